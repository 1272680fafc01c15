"""The HTTP server in front of an engine, the router in front of servers, and the web page."""
