"""The address that a server of this machine listens on."""

import socket


def require_free(host: str, port: str | int, settings: str) -> None:
    """Raises ValueError if no server can listen on an address; `settings` are the options or variables that set it."""
    try:
        number = int(port)
        if not host or not 1 <= number <= 65535:
            raise ValueError
    except ValueError:
        message = f"{host or 'no host'}:{port} is not a valid address"
        raise ValueError(f"{message}: set a host and a port from 1 to 65535 by {settings}") from None
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, number, type=socket.SOCK_STREAM):
            socket.create_server(address, family=family).close()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ValueError(f"cannot listen on {host}:{number} ({reason}): set another address by {settings}") from None
