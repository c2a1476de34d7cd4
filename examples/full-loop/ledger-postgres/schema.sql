-- The books. No unique constraint, on purpose: a second entry would show.
CREATE TABLE entries (
    message   text   NOT NULL,
    payout_id text   NOT NULL,
    amount    bigint NOT NULL
);
