-- The key index in two trees, so that a merge from memory rewrites a small one. A merge into a
-- large tree touches every page of it, and would cost more with every stored event.

-- Keys on their way to hapax_key, moved there in order once they are many. A key stands in one.
CREATE TABLE hapax_key_young (
    hash BLOB PRIMARY KEY,
    seq  INTEGER NOT NULL
) WITHOUT ROWID;
