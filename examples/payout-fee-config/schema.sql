-- Your tables live beside ours, in hapax-data/hapax.db. There is no unique constraint on purpose:
-- that each fee is charged once is Hapax's promise, and a second row would show it broken.
CREATE TABLE payout_fees (
    payout_id  TEXT NOT NULL,
    amount     INTEGER NOT NULL,
    fee        INTEGER NOT NULL,
    charged_at TEXT NOT NULL
);
