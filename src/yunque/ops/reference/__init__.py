"""Short, plain versions of every primitive: what the fast ones must equal."""
