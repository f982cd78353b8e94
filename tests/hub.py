"""A stand-in for the Hugging Face hub on 127.0.0.1: as much of its protocol as a download of a large file takes.

As at the real one, a file's address answers with its size, checksum and revision, and sends on to another host, which has
the bytes, whole or from a Range on. Faults are chosen per file.
"""
import hashlib
import re
import socket
import struct
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RESOLVE = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"


class Hub:
    """Serves `files`, {name: bytes}, in a with block. `heads` has the names whose size and checksum were asked for, `asked`
    every request for bytes: (name, its Range or None)."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.heads, self.asked = [], []
        self.breaks = defaultdict(list)   # name: [(bytes, how)], an answer each: so many bytes, then the connection is closed
        self.release = threading.Event()  # ("close"), or silent ("hold") until this is set, or then reset ("reset")
        self.etags = {}                   # name: another checksum; None: no headers of the hub's own
        self.gather = None                # a Barrier that every request for bytes has to pass

    def __enter__(self):
        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], ConnectionError):   # that is how a killed client takes its leave
            super().handle_error(request, address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def answer(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def do_HEAD(self):
        name = self.path.rpartition("/")[2]
        self.hub.heads.append(name)
        self.send_on(name)

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if self.path.startswith(RESOLVE):
            return self.send_on(name)
        if self.path != f"/bytes/{name}":
            return self.answer(404, Content_Length=0)
        body, begin = self.hub.files[name], 0
        self.hub.asked.append((name, self.headers["Range"]))
        if self.hub.gather:
            try:
                self.hub.gather.wait()
            except threading.BrokenBarrierError:
                return self.answer(400, Content_Length=0)
        how_many, how = self.hub.breaks[name].pop(0) if self.hub.breaks[name] else (len(body), None)
        if self.headers["Range"]:
            begin = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
            self.answer(206, Content_Length=len(body) - begin, Content_Range=f"bytes {begin}-{len(body) - 1}/{len(body)}")
        else:
            self.answer(200, Content_Length=len(body))
        self.wfile.write(body[begin:begin + how_many])
        if how in ("hold", "reset"):
            self.hub.release.wait()
        if how == "reset":   # closing a socket that lingers for 0 s sends RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
        self.close_connection = how is not None

    def send_on(self, name):
        if name not in self.hub.files or not self.path.startswith(RESOLVE):
            return self.answer(404, X_Error_Code="EntryNotFound", Content_Length=0)
        body = self.hub.files[name]
        etag = self.hub.etags.get(name, hashlib.sha256(body).hexdigest())
        headers = {} if etag is None else {"X-Repo-Commit": "0" * 40, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": len(body)}
        self.answer(302, Location=f"http://localhost:{self.hub.port}/bytes/{name}", Content_Length=0, **headers)
