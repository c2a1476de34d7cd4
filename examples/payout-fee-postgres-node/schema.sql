-- The ledger, and a role for the app with no other rights. Run it once, after `hapax migrate up` has
-- created the schema hapax.

-- No unique constraint, on purpose: a second fee would show.
CREATE TABLE payout_fees (
    payout_id text   NOT NULL,
    amount    bigint NOT NULL,
    fee       bigint NOT NULL
);

CREATE ROLE payout_app LOGIN;       -- yours: with a password
-- A process that hangs in its transaction holds its job until the server ends the session.
ALTER ROLE payout_app SET idle_in_transaction_session_timeout = '20s';
ALTER ROLE payout_app SET statement_timeout = '20s';
GRANT INSERT ON payout_fees TO payout_app;
GRANT EXECUTE ON FUNCTION
    hapax.complete(uuid, bigint, text),
    hapax.publish(text, jsonb, text, text, text, text),
    hapax.once(text, text, text)
TO payout_app;
