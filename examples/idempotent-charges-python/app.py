#!/usr/bin/env python3
"""An API that charges, in PostgreSQL, exactly once for each Idempotency-Key.

A Hapax proxy in front of this app forwards each request once, with three more headers:
idempotency-key, hapax-scope and hapax-fence. The charge and its answer are one transaction of this
app: both commit, or neither. So the table needs no unique constraint. The process may die at any
point, and its answer may be lost.

The app needs psycopg 3, PostgreSQL, and a role with the rights that schema.sql grants.

    DATABASE_URL   postgres://charges_app@127.0.0.1/charges unless set
    PORT           where it listens, 3000 unless set; 0 picks a free one
    DIE_AT         for experiments: the step at which this process kills itself
"""

import json
import os
import signal
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg
from psycopg.types.json import Jsonb

DATABASE_URL = os.environ.get("DATABASE_URL", "postgres://charges_app@127.0.0.1/charges")
PORT = int(os.environ.get("PORT", "3000"))

BODY_BYTES_MAX = 1024 * 1024
CONNECT_SECONDS = 4

# hapax.finish raises this if a later attempt has the key, or if an answer is already stored.
FENCE_LOST = "XH001"


def handle(headers, body):
    """The status and the answer."""
    try:
        amount = read_amount(body)
    except (KeyError, TypeError, ValueError):
        return 422, {"error": "amount must be a number above zero"}
    scope, key, fence = (headers.get(n) for n in ("hapax-scope", "idempotency-key", "hapax-fence"))
    if not (scope and key and fence):
        # Without the proxy or without a key, a retry would be charged twice.
        return 400, {"error": "Idempotency-Key needed"}
    try:
        return 201, charge(headers.get("x-account-id"), amount, scope, key, int(fence))
    except psycopg.Error as error:
        if error.diag.sqlstate == FENCE_LOST:
            # Everything was rolled back. The client gets the stored answer, not this one.
            return 409, {"error": "another attempt holds this key, or the answer is already stored"}
        return 503, {"error": "the database failed; the charge was made completely or not at all"}


def charge(account, amount, scope, key, fence):
    """The charge and the answer to it, in one transaction."""
    charged = {"id": f"ch_{uuid.uuid4()}", "amount": amount}
    step("before begin")
    with psycopg.connect(DATABASE_URL, connect_timeout=CONNECT_SECONDS) as database:
        # An exception that leaves this block rolls back. The end of the block is the COMMIT.
        database.execute(
            "INSERT INTO charges (id, account, amount, key) VALUES (%s, %s, %s, %s)",
            (charged["id"], account, amount, key),
        )
        step("after insert")
        database.execute(
            "SELECT hapax.finish(%s, %s, %s, 201, %s, %s)",
            (scope, key, fence, Jsonb({"content-type": "application/json"}), said(charged)),
        )
        step("before commit")
    step("after commit")
    return charged


def read_amount(body):
    amount = json.loads(body)["amount"]
    if type(amount) is not int or amount <= 0:
        raise ValueError("amount")
    return amount


def said(answer):
    return json.dumps(answer).encode()


def step(name):
    """Kills the process if DIE_AT names this step."""
    if os.environ.get("DIE_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            return self.answer(413, {"error": "no length, or too large"})
        body = self.rfile.read(int(length))
        if self.path != "/charges":
            return self.answer(404, {"error": "POST /charges"})
        self.answer(*handle(self.headers, body))

    def answer(self, status, answer):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said(answer))))
        self.end_headers()
        self.wfile.write(said(answer))

    def log_message(self, *_):
        """Hapax logs every request."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # A burst of connections must not be refused.
    request_queue_size = 128


if __name__ == "__main__":
    with Server(("127.0.0.1", PORT), Api) as server:
        print(f"app ready: http://127.0.0.1:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
