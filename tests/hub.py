"""Fakes the Hugging Face hub on 127.0.0.1, as far as the download of a large file needs its protocol.

As in the real one, a file's URL answers with size, checksum and revision, and redirects to another host. That
host serves the bytes, all of them or from a Range on. Faults are chosen per file.
"""

import hashlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """Serves `files`, {name: bytes}, of FineWeb's dataset, in a with block.

    heads: names of the files whose size and checksum were requested. requests: requests for bytes, as (name,
    Range or None). Both in order of arrival.
    """

    root = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.heads = []
        self.requests = []
        # name: bytes of the next response, which is then silent until `release` is set, and is then reset.
        self.breaks = {}
        self.release = threading.Event()
        self.etags = {}  # name: another checksum
        self.gather = None  # a Barrier that every request for bytes passes

    def handle_error(self, request, address):
        """Ignores the errors of clients that were killed."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.release.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def do_HEAD(self):
        name = self.path.rpartition("/")[2]
        self.server.heads.append(name)
        self.redirect(name)

    def do_GET(self):
        hub = self.server
        name = self.path.rpartition("/")[2]
        if self.path != f"/bytes/{name}":
            return self.redirect(name)
        body = hub.files[name]
        asked = self.headers["Range"]
        hub.requests.append((name, asked))
        if hub.gather:
            hub.gather.wait()
        status = 200
        begin = 0
        headers = {}
        if asked:
            status = 206
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        headers["Content-Length"] = len(body) - begin
        self.answer(status, headers)
        if name not in hub.breaks:
            self.wfile.write(body[begin:])
            return
        self.wfile.write(body[begin : begin + hub.breaks.pop(name)])
        hub.release.wait()
        # Closing a socket that lingers for 0 s sends RST instead of FIN.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()
        self.close_connection = True

    def redirect(self, name):
        hub = self.server
        if name not in hub.files or not self.path.startswith(hub.root):
            return self.answer(404, {"Content-Length": 0})
        body = hub.files[name]
        etag = hub.etags.get(name, hashlib.sha256(body).hexdigest())
        headers = {
            "X-Repo-Commit": "0" * 40,
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": len(body),
            "Location": f"http://localhost:{hub.server_port}/bytes/{name}",
            "Content-Length": 0,
        }
        self.answer(302, headers)
