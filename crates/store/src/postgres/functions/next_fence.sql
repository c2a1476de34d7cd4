-- Keeps: a fence that was not issued cannot be guessed, and a later fence is larger. Job ids follow
-- from event ids, so otherwise a role that may only call hapax.complete could end the work of
-- another. A gap is random, up to 2^40 at first and always a small part of what is left below 2^53,
-- the largest number that JSON clients read exactly. The random number is 48 bits of
-- gen_random_uuid(), because random() is predictable.
CREATE OR REPLACE FUNCTION hapax.next_fence(after bigint) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT after + 1 + ('x' || pg_catalog.translate(
            pg_catalog.substr(pg_catalog.gen_random_uuid()::text, 1, 13), '-', ''))::bit(48)::bigint
        % ((9007199254740991 - after) / 8192 + 1);
$$;
