"""The command line: it reads arguments, constructs, and prints; everything else receives."""
