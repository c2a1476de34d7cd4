#!/usr/bin/env python3
"""Charges a fee of 0.5 % for every payout that was paid: a pull worker without any package.

The worker leases jobs over the API, writes each fee to its own database, and completes the job under
the fence of its claim. That database is outside Hapax. If the worker or the server dies between the
fee and the completion, the job comes again with the same idempotency key. The primary key of the
table then keeps the fee from being charged twice.

    HAPAX_ADMIN   the server's admin side, http://127.0.0.1:8081 unless set
    HAPAX_TOKEN   a token that allows "claim:stripe/charge-fee", as hapax.toml has one
    FEES_DB       where the fees are written, fees.db unless set
"""

import json
import os
import sqlite3
import time
import urllib.error
import urllib.request

ADMIN = os.environ.get("HAPAX_ADMIN", "http://127.0.0.1:8081")
TOKEN = os.environ.get("HAPAX_TOKEN")
FEES_DB = os.environ.get("FEES_DB", "fees.db")

# Few enough jobs to finish within one lease.
CLAIM_LIMIT = 10
# Longer than a claim may wait.
ANSWER_SECONDS = 40
RETRY_SECONDS = 0.5


def main():
    fees = open_fees()
    while True:
        try:
            for claim in claim_jobs():
                work(fees, claim)
        except (urllib.error.URLError, OSError, ValueError) as error:
            # The server restarts, or closed the connection. Jobs that were claimed and not completed
            # can be claimed again when their lease ends.
            print(f"request to {ADMIN} failed: {error}; retrying", flush=True)
            time.sleep(RETRY_SECONDS)


def work(fees, claim):
    """Does one job and settles it under its fence."""
    try:
        fee = charge(fees, claim)
    except (KeyError, TypeError, ValueError) as error:
        settle(claim, "fail", {"error": f"not a payout: {error!r}"})
        return
    if settle(claim, "complete", {"result": f"fee {fee}"}):
        print(f"{claim['event']['event_id']}: fee {fee}", flush=True)


def charge(fees, claim):
    """Writes the fee once per idempotency key. Amounts are in minor units; half a unit is rounded up."""
    payout = json.loads(claim["event"]["body"])["data"]["object"]
    fee = (payout["amount"] * 5 + 500) // 1000
    with fees:
        fees.execute(
            "INSERT INTO payout_fees VALUES (?, ?, ?, ?) ON CONFLICT (idempotency_key) DO NOTHING",
            (claim["idempotency_key"], payout["id"], payout["amount"], fee),
        )
    return fee


def claim_jobs():
    """Leases due jobs; waits if there are none."""
    asked = {"source": "stripe", "handler": "charge-fee", "limit": CLAIM_LIMIT, "wait": "30s"}
    return post("/api/v1/claims", asked)["items"]


def settle(claim, how, outcome):
    """False if the fence was lost: another worker has claimed the job and settles it."""
    try:
        post(f"/api/v1/claims/{claim['job']}/{how}", {"fence": claim["fence"], **outcome})
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return False
        raise
    return True


def post(path, body):
    headers = {"content-type": "application/json"}
    if TOKEN:
        headers["authorization"] = f"Bearer {TOKEN}"
    request = urllib.request.Request(ADMIN + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def open_fees():
    fees = sqlite3.connect(FEES_DB)
    fees.execute(
        "CREATE TABLE IF NOT EXISTS payout_fees ("
        " idempotency_key TEXT PRIMARY KEY, payout_id TEXT, amount INTEGER, fee INTEGER)"
    )
    return fees


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
