-- The ledger, and a role for the app that may do nothing else. To be run once, after
-- `hapax migrate up` has made the schema hapax.

-- Without a unique constraint: that a fee is charged once is not this table's doing.
CREATE TABLE payout_fees (
    payout_id text   NOT NULL,
    amount    bigint NOT NULL,
    fee       bigint NOT NULL
);

CREATE ROLE payout_app LOGIN;       -- yours: with a password
-- A process that hangs in the middle holds its job until the server ends its session.
ALTER ROLE payout_app SET idle_in_transaction_session_timeout = '20s';
ALTER ROLE payout_app SET statement_timeout = '20s';
GRANT INSERT ON payout_fees TO payout_app;
GRANT EXECUTE ON FUNCTION
    hapax.complete(uuid, bigint, text),
    hapax.publish(text, jsonb, text, text, text, text),
    hapax.once(text, text, text)
TO payout_app;
