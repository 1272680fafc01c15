"""The socket that a server listens on."""

import socket

_BACKLOG = 2048


def listen(host: str, port: int, *, send_timeout_s: float | None = None) -> socket.socket:
    """Take ``port`` (0: any free one) of ``host``, an address or a name. Raises ``OSError``.

    A connection whose client takes nothing for ``send_timeout_s`` is cut (Linux).
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio does not see that it is and leaves Nagle's delay of 40 ms on every connection.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
        if send_timeout_s is not None and user_timeout is not None:  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, user_timeout, round(send_timeout_s * 1000))
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Where it is, with the port that it really has."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
