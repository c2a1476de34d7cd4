-- The books, in ledger/hapax-data/hapax.db. No unique constraint, on purpose: a second entry would show.
CREATE TABLE entries (
    message   TEXT NOT NULL,
    payout_id TEXT NOT NULL,
    amount    INTEGER NOT NULL
);
