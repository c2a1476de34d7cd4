-- Your tables live beside Hapax's, in hapax-data/hapax.db. There is no unique constraint, on purpose:
-- Hapax ensures that each fee is charged once, and a second row would show a failure.
CREATE TABLE payout_fees (
    payout_id  TEXT NOT NULL,
    amount     INTEGER NOT NULL,
    fee        INTEGER NOT NULL,
    charged_at TEXT NOT NULL
);
