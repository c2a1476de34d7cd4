#!/usr/bin/env python3
"""Receives the deliveries of Hapax and records each paid invoice once.

The official standardwebhooks package verifies each delivery. A delivery can come more than once: its
answer was lost, or the sender died before it recorded the answer. Every copy has the same webhook-id.
So that id and the effect are one transaction of this app: both commit, or neither.

    PORT             where it listens, 3000 unless set; 0 picks a free one
    WEBHOOK_SECRET   the endpoint's secret, the one of the README unless set
    INVOICES_DB      where invoices are recorded, invoices.db unless set
    DIE_AT           for experiments: the step at which this process kills itself
"""

import os
import signal
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

PORT = int(os.environ.get("PORT", "3000"))
SECRET = os.environ.get("WEBHOOK_SECRET", "whsec_YSByZWNlaXZlciBpbiBQeXRob24sIGZvciBzaG93ISE=")
INVOICES_DB = os.environ.get("INVOICES_DB", "invoices.db")

# 1 MiB, the most data of a message, and 4 KiB for the rest of the body.
BODY_BYTES_MAX = 1024 * 1024 + 4096

webhook = Webhook(SECRET)
one_at_a_time = threading.Lock()


def handle(headers, body):
    """The status and the answer."""
    try:
        message = webhook.verify(body, dict(headers.items()))
    except (WebhookVerificationError, ValueError) as error:
        return 401, f"not verified: {error}"
    if message["type"] != "invoice.paid":
        # A 2xx, because the sender would retry after any other answer.
        return 200, "nothing to record"
    with one_at_a_time:
        return 200, record(headers["webhook-id"], message["data"])


def record(webhook_id, invoice):
    """Records the invoice, unless a copy of this message has done so."""
    with invoices:
        # An exception that leaves this block rolls back. The end of the block is the COMMIT.
        seen = invoices.execute(
            "INSERT INTO seen_messages (id) VALUES (?) ON CONFLICT DO NOTHING", (webhook_id,)
        )
        if seen.rowcount == 0:
            return "recorded before"
        invoices.execute(
            "INSERT INTO paid_invoices (invoice, amount) VALUES (?, ?)",
            (invoice["id"], invoice["amount"]),
        )
        step("before commit")
    step("after commit")
    return "recorded"


def open_invoices():
    database = sqlite3.connect(INVOICES_DB, check_same_thread=False)
    # The second table has no constraint, on purpose: an invoice that was recorded twice would show.
    database.executescript(
        "CREATE TABLE IF NOT EXISTS seen_messages (id TEXT PRIMARY KEY);"
        "CREATE TABLE IF NOT EXISTS paid_invoices (invoice TEXT, amount INTEGER);"
    )
    return database


def step(name):
    """Kills the process if DIE_AT names this step."""
    if os.environ.get("DIE_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


class Deliveries(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            return self.answer(413, "no length, or too large")
        body = self.rfile.read(int(length))
        if self.path != "/in":
            return self.answer(404, "POST /in")
        self.answer(*handle(self.headers, body))

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Hapax records every attempt."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # A burst of connections must not be refused.
    request_queue_size = 128


if __name__ == "__main__":
    invoices = open_invoices()
    with Server(("127.0.0.1", PORT), Deliveries) as server:
        print(f"app ready: http://127.0.0.1:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
