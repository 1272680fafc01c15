"""The wire: requests and replies of policies, engines and the APIs that clients speak; imports without torch."""
