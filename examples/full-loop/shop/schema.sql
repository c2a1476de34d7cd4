-- The shop's own table, in shop/hapax-data/hapax.db. No unique constraint, on purpose: a second row would show.
CREATE TABLE payouts (
    payout_id TEXT NOT NULL,
    amount    INTEGER NOT NULL
);
