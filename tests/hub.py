"""Fakes the Hugging Face hub on 127.0.0.1, as far as the download of a large file needs its protocol.

As in the real one, a file's URL answers with size, checksum and revision, and redirects to another host. That
host serves the bytes, all of them or from a Range on. Faults are chosen per file.
"""

import hashlib
import re
import socket
import struct
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Serves `files`, {name: bytes}, of FineWeb's dataset, in a with block.

    heads: names of the files whose size and checksum were requested. requests: requests for bytes, as (name,
    Range or None). Both in order of arrival.
    """

    root = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

    def __init__(self, files):
        self.files = files
        self.heads = []
        self.requests = []
        # name: [(size, how)], one per response: it stops after `size` bytes. hold: it is silent until
        # `release` is set, and is then closed; reset: likewise, and is then reset.
        self.breaks = defaultdict(list)
        self.release = threading.Event()
        self.etags = {}  # name: another checksum
        self.gather = None  # a Barrier that every request for bytes passes

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
    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a killed client
            super().handle_error(request, address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def do_HEAD(self):
        name = self.path.rpartition("/")[2]
        self.hub.heads.append(name)
        self.redirect(name)

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if self.path != f"/bytes/{name}":
            return self.redirect(name)
        body = self.hub.files[name]
        asked = self.headers["Range"]
        self.hub.requests.append((name, asked))
        if self.hub.gather:
            self.hub.gather.wait()
        size = len(body)
        how = None
        if self.hub.breaks[name]:
            size, how = self.hub.breaks[name].pop(0)
        begin = 0
        if asked:
            begin = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            part = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            self.answer(206, {"Content-Length": len(body) - begin, "Content-Range": part})
        else:
            self.answer(200, {"Content-Length": len(body)})
        self.wfile.write(body[begin : begin + size])
        if how:
            self.hub.release.wait()
        if how == "reset":  # closing a socket that lingers for 0 s sends RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
        self.close_connection = how is not None

    def redirect(self, name):
        if name not in self.hub.files or not self.path.startswith(self.hub.root):
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "Content-Length": 0})
        body = self.hub.files[name]
        etag = self.hub.etags.get(name, hashlib.sha256(body).hexdigest())
        headers = {
            "X-Repo-Commit": "0" * 40,
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": len(body),
            "Location": f"http://localhost:{self.hub.port}/bytes/{name}",
            "Content-Length": 0,
        }
        self.answer(302, headers)
