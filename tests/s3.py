"""A real S3 server on the loopback (moto's, in a process of its own), and faults in front of it."""

from __future__ import annotations

import http.client
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.servers import end, free_port

KEY_ID, SECRET = "fsdplabtestkeyid", "fsdplab-test-secret-0f1e2d3c4b5a"
ALL_OF_THEM = math.inf
_ANSWER = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


@contextmanager
def s3_server(
    folder: Path, port: int | None = None, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[int]:
    """The port of a server with an empty bucket, `bucket`; its log is `s3.log` in the folder.

    Args:
        within: what begins each command that is to reach it.
    """
    port = port or free_port()
    command = [*within, sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    with (folder / "s3.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        make = [*within, sys.executable, "-c", _MAKE_BUCKET, f"http://{host}:{port}/bucket"]
        while subprocess.run(make, timeout=20, check=False).returncode:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "s3.log").read_text()
            time.sleep(0.2)
        yield port
    finally:
        end(process)


_MAKE_BUCKET = """
import sys, urllib.request
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT"), timeout=5).close()
except OSError:
    sys.exit(1)
"""


def settings(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """The environment of who uses it."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


class Faults:
    """What stands between a client and the server.

    Attributes:
        delay_s: every answer comes so much later.
        every: one in so many requests is answered 503; 0: none.
        cuts: so many connections more are cut without an answer; `ALL_OF_THEM`: the server is away.
        forbidden: requests that match this expression (`PUT /bucket/…`) are answered 403; "": none.
        requests: `(method, path)` of all that came.
    """

    def __init__(self, port: int) -> None:
        self.delay_s, self.every, self.cuts, self.forbidden = 0.0, 0, 0.0, ""
        self.requests: list[tuple[str, str]] = []
        self.behind = port

    def refusal(self, method: str, path: str) -> tuple[int, str] | None:
        """What a request gets instead of an answer."""
        if self.forbidden and re.search(self.forbidden, f"{method} {path}"):
            return 403, _ANSWER.format(code="AccessDenied", message="Access Denied")
        if self.every and len(self.requests) % self.every == 0:
            return 503, _ANSWER.format(code="ServiceUnavailable", message="Please try again")
        return None


@contextmanager
def faulty(port: int) -> Iterator[tuple[int, Faults]]:
    """`(port, faults)` of a proxy in front of a server, which passes everything on until told otherwise."""
    faults = Faults(port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            faults.requests.append((self.command, self.path))
            body = self._body()
            time.sleep(faults.delay_s)
            if faults.cuts > 0:
                faults.cuts -= 1
                self.close_connection = True
                return
            if refused := faults.refusal(self.command, self.path):
                self._answer(refused[0], [("Content-Type", "application/xml")], refused[1].encode())
                return
            behind = http.client.HTTPConnection("127.0.0.1", faults.behind, timeout=60)
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "expect"):
                    behind.putheader(name, value)
            behind.putheader("Content-Length", str(len(body)))
            behind.endheaders(body)
            answer = behind.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
            behind.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return b"".join(parts)

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            with suppress(ConnectionError):
                self.send_response_only(status)
                length = {name.lower(): value for name, value in headers}.get("content-length", str(len(body)))
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], faults
    finally:
        server.shutdown()
        server.server_close()


def held_in(folder: Path, word: str) -> list[str]:
    """The files below a folder that have a word in them."""
    held = []
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                if word.encode() in Path(where, name).read_bytes():
                    held.append(str(Path(where, name)))
    return held
