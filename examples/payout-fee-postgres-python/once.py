#!/usr/bin/env python3
"""Charges the fee of one payout once, however often it runs, without a Hapax server.

    python3 once.py PAYOUT_ID AMOUNT

hapax.once claims the key inside this transaction. A second run waits for the first to commit and gets
false. A run that dies before its commit has claimed nothing.

    DATABASE_URL   postgres://payout_app@127.0.0.1/payouts unless set
    DIE_AT         for experiments: the step at which this process kills itself
"""

import sys

import psycopg

from app import DATABASE_URL, fee_of, step


def main(payout_id, amount):
    with psycopg.connect(DATABASE_URL) as database:
        (ours,) = database.execute(
            "SELECT hapax.once('payout-fees', %s)", (payout_id,)
        ).fetchone()
        step("after once")
        if not ours:
            return "charged before"
        fee = fee_of(amount)
        database.execute(
            "INSERT INTO payout_fees (payout_id, amount, fee) VALUES (%s, %s, %s)",
            (payout_id, amount, fee),
        )
        step("before commit")
    step("after commit")
    return f"fee {fee}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python3 once.py PAYOUT_ID AMOUNT")
    print(main(sys.argv[1], int(sys.argv[2])))
