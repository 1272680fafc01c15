"""The numeric primitives: plain references that are the specification, and portable tuned versions."""
