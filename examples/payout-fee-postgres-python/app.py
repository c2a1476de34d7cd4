#!/usr/bin/env python3
"""Charges a fee of 0.5 % for every payout that was paid, in PostgreSQL, exactly once.

Hapax posts each event here, signed as Standard Webhooks, with the job and the fence of its claim in
two headers. The fee, a message about it and the job's "done" are one transaction of this app: all
three commit, or none. So the ledger needs no unique constraint. The process may die at any point, a
request may be repeated, and an answer may be lost.

The app needs psycopg 3, PostgreSQL, and a role with the rights that schema.sql grants.

    DATABASE_URL   postgres://payout_app@127.0.0.1/payouts unless set
    HOOK_SECRET    the secret that signs requests from Hapax
    PORT           where it listens, 3000 unless set; 0 picks a free one
    DIE_AT         for experiments: the step at which this process kills itself
"""

import base64
import hashlib
import hmac
import json
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg
from psycopg.types.json import Jsonb

DATABASE_URL = os.environ.get("DATABASE_URL", "postgres://payout_app@127.0.0.1/payouts")
HOOK_SECRET = os.environ.get("HOOK_SECRET", "whsec_cGF5b3V0IGZlZXMgaW4gYSBib29r")
PORT = int(os.environ.get("PORT", "3000"))

TOLERANCE_SECONDS = 300
BODY_BYTES_MAX = 1024 * 1024
CONNECT_SECONDS = 4

# hapax.complete raises this if another attempt has the job, or if the job is already done.
FENCE_LOST = "XH001"


def handle(headers, body):
    """The status and the text of the answer."""
    if not is_signed(headers, body):
        return 401, "not signed by Hapax"
    try:
        payout = read_payout(body)
        job, fence = headers["hapax-job"], int(headers["hapax-fence"])
    except (KeyError, TypeError, ValueError) as error:
        return 422, f"not a payout: {error!r}"
    try:
        return 200, charge(payout, job, fence)
    except psycopg.Error as error:
        if error.diag.sqlstate == FENCE_LOST:
            # Everything was rolled back. Hapax reads the job again, so the answer does not matter.
            return 409, "another attempt holds this job, or the job is done"
        return 503, "the database failed; the fee was charged completely or not at all"


def charge(payout, job, fence):
    """The work and its "done", in one transaction."""
    fee = fee_of(payout["amount"])
    result = f"fee {fee}"
    step("before begin")
    with psycopg.connect(DATABASE_URL, connect_timeout=CONNECT_SECONDS) as database:
        # An exception that leaves this block rolls back. The end of the block is the COMMIT.
        database.execute(
            "INSERT INTO payout_fees (payout_id, amount, fee) VALUES (%s, %s, %s)",
            (payout["id"], payout["amount"], fee),
        )
        step("after insert")
        database.execute("SELECT hapax.complete(%s, %s, %s)", (job, fence, result))
        step("after complete")
        # The message is published last, because its key is locked until the commit.
        database.execute(
            "SELECT hapax.publish('fee.charged', %s, key => %s)",
            (Jsonb({"payout": payout["id"], "fee": fee}), payout["id"]),
        )
        step("before commit")
    step("after commit")
    return result


def fee_of(amount):
    """0.5 % in minor units; half a unit is rounded up."""
    return (amount * 5 + 500) // 1000


def read_payout(body):
    payout = json.loads(body)["data"]["object"]
    is_amount = type(payout["amount"]) is int and payout["amount"] >= 0
    if not is_amount or not isinstance(payout["id"], str):
        raise ValueError("id or amount")
    return payout


def is_signed(headers, body):
    """Standard Webhooks: HMAC-SHA256 over id, time and body; any one signature must match."""
    stamp = headers.get("webhook-timestamp", "")
    if not stamp.isdecimal() or abs(time.time() - int(stamp)) > TOLERANCE_SECONDS:
        return False
    key = base64.b64decode(HOOK_SECRET.removeprefix("whsec_"))
    signed = f"{headers.get('webhook-id', '')}.{stamp}.".encode("latin-1") + body
    expected = b"v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256))
    given = headers.get("webhook-signature", "").encode("latin-1").split()
    return any(hmac.compare_digest(expected, one) for one in given)


def step(name):
    """Kills the process if DIE_AT names this step."""
    if os.environ.get("DIE_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


class Hooks(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            return self.answer(413, "no length, or too large")
        body = self.rfile.read(int(length))
        if self.path != "/hooks":
            return self.answer(404, "POST /hooks")
        self.answer(*handle(self.headers, body))

    def answer(self, status, text):
        said = text.encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        """Hapax records every attempt."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # A burst of connections must not be refused.
    request_queue_size = 128


if __name__ == "__main__":
    with Server(("127.0.0.1", PORT), Hooks) as server:
        print(f"app ready: http://127.0.0.1:{server.server_port}/hooks", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
