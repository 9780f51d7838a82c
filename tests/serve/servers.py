"""Real servers in processes of their own, and raw connections to them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

from tests.helpers import ROOT, RUN_CLI


class Server:
    """A `cnmm serve` that has said its address."""

    def __init__(self, ladder, *flags, patch=""):
        command = [sys.executable, "-c", f"{patch}\n{RUN_CLI}", "serve", ladder, "--port", 0, *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if "cheapest" in line:
                break
        found = re.search(r"http://\S+", "".join(self.said))
        assert found, "".join(self.said)
        self.url = found[0]
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr))
        self.reader.start()

    @property
    def address(self):
        parts = urlsplit(self.url)
        return parts.hostname, parts.port

    def connect(self):
        """A raw connection, for clients that do not behave."""
        return socket.create_connection(self.address, timeout=30)

    def workers(self):
        """Processes of its workers."""
        shown = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout
        return [int(line.split()[0]) for line in shown.splitlines() if "cnmm.serve.worker" in line]

    def end(self, number=signal.SIGINT):
        """Its exit status and all that it said."""
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.reader.join(10)
        return status, "".join(self.said)


@contextlib.contextmanager
def served(ladder, *flags, patch=""):
    """`patch` is code that runs first, to make limits short enough for a test."""
    server = Server(ladder, *flags, patch=patch)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            for worker in server.workers():  # one that was stopped would never end
                os.kill(worker, signal.SIGKILL)
            server.process.kill()
            server.process.wait()
        server.reader.join(10)
        server.process.stderr.close()


def read_all(connection):
    """Everything until the other side hangs up."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def read_response(connection):
    """Status, headers and body of one response."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(2**16)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers["content-length"]):
        body += connection.recv(2**16)
    return int(first.split()[1]), headers, body
