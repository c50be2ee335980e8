"""Addresses that servers are asked to listen on."""

import re
import socket

import pytest

from pipelines.address import require_free


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_free_port_remains_free(host: str) -> None:
    port = free_port()
    require_free(host, port, "--port")
    require_free(host, str(port), "--port")


@pytest.mark.parametrize("port", [70000, 0, -1, 65536, "abc", "", "5e3"])
def test_what_is_no_port_is_refused(port: str | int) -> None:
    with pytest.raises(ValueError, match=rf"^127.0.0.1:{port} is not a valid address: .* from 1 to 65535 by --port$"):
        require_free("127.0.0.1", port, "--port")


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^cannot listen on 127.0.0.1:{port} \(.*in use.*\): set another .* by --port$"):
            require_free("127.0.0.1", port, "--port")


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "300.1.1.1", "192.0.2.1", "x" * 70, "a..b"])
def test_what_is_no_host_of_this_machine_is_refused(host: str) -> None:
    """An empty one, such as of an unset variable, would mean all addresses."""
    with pytest.raises(ValueError, match=rf"{re.escape(host or 'no host')}:\d+ .* by --host$") as error:
        require_free(host, free_port(), "--host")
    assert "\n" not in str(error.value)
