-- The charges, and a role for the app that may do nothing else. To be run once, after
-- `hapax migrate up` has made the schema hapax.

-- Without a unique constraint: that a key is charged once is not this table's doing.
CREATE TABLE charges (
    id      text   NOT NULL,
    account text,
    amount  bigint NOT NULL,
    key     text   NOT NULL
);

CREATE ROLE charges_app LOGIN;      -- yours: with a password
-- A process that hangs in the middle holds its key until the server ends its session.
ALTER ROLE charges_app SET idle_in_transaction_session_timeout = '20s';
ALTER ROLE charges_app SET statement_timeout = '20s';
GRANT INSERT ON charges TO charges_app;
GRANT EXECUTE ON FUNCTION
    hapax.finish(text, text, bigint, int, jsonb, bytea)
TO charges_app;
