-- The shop's own table. No unique constraint, on purpose: a second row would show.
CREATE TABLE payouts (
    payout_id text   NOT NULL,
    amount    bigint NOT NULL
);
