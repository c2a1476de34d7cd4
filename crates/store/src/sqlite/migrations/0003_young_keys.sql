-- The key index in two trees, so that a merge from memory rewrites a small one. What it touches in a
-- large tree is every page of it, and that would cost more with every event there ever was.

-- Keys on their way to hapax_key, moved there in order once they are many. A key stands in one.
CREATE TABLE hapax_key_young (
    hash BLOB PRIMARY KEY,
    seq  INTEGER NOT NULL
) WITHOUT ROWID;
