"""An HTTP proxy in front of a real MLflow server that can answer with errors or drop the server's responses."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.service.waiting import DEADLINE_S

Answer = Literal["pass", "error", "lose"]
"""pass: forward the server's response. error: answer 500 without asking the server. lose: drop its response."""


@dataclass
class Proxy:
    """A proxy on this machine that treats each request by its rule."""

    uri: str
    rule: Callable[[str, int], Answer]
    """Function of the HTTP method and the number of earlier requests with the same method and path."""
    answers: list[tuple[str, str, Answer]] = field(default_factory=list)
    """HTTP method, path and treatment of every request so far."""


@contextlib.contextmanager
def proxy_to(server_uri: str) -> Iterator[Proxy]:
    """Yields a proxy of the server that forwards everything until it is given another rule."""

    class Handler(BaseHTTPRequestHandler):
        def _treat(self) -> None:
            with lock:
                asked = (self.command, self.path)
                number = sum((method, path) == asked for method, path, _ in proxy.answers)
                answer = proxy.rule(self.command, number)
                proxy.answers.append((*asked, answer))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if answer == "error":
                self._send(500, b"the server has a bad day", {})
                return
            connection = http.client.HTTPConnection(urlsplit(server_uri).netloc, timeout=DEADLINE_S)
            try:
                connection.request(self.command, self.path, body, {**self.headers, "Connection": "close"})
                response = connection.getresponse()
                content = response.read()
            except OSError:  # no server: the client gets no response either
                self.close_connection = True
                return
            finally:
                connection.close()
            if answer == "pass":
                self._send(response.status, content, {"Content-Type": response.getheader("Content-Type", "")})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _treat  # noqa: N815  # names that http.server looks for

        def log_message(self, *args: Any) -> None:
            pass

    lock = threading.Lock()
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = Proxy(uri=f"http://127.0.0.1:{listener.server_address[1]}", rule=lambda method, number: "pass")
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
