//! A user's tables in `hapax.db`, made before the server first starts, without any constraint that
//! would hide an effect that happened twice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::House;

/// What a handler writes: a row for each event, and a sum that a second run would show in.
pub(crate) const SCHEMA: &str = "
    CREATE TABLE ledger (event_id TEXT, handler TEXT, attempt INTEGER);
    CREATE TABLE account (balance INTEGER);
    INSERT INTO account VALUES (0);";

/// The statements of a handler that writes one row and moves the balance by one.
pub(crate) fn effect(handler: &str) -> String {
    format!(
        "INSERT INTO ledger VALUES (:event_id, '{handler}', :attempt);
         UPDATE account SET balance = balance + 1"
    )
}

/// The user's side of a database.
pub(crate) struct Ledger(PathBuf);

impl Ledger {
    /// Makes the tables, in a data dir that no server has seen yet.
    pub(crate) fn create(house: &House, schema: &str) -> Self {
        let ledger = Self(house.database());
        std::fs::create_dir_all(ledger.0.parent().unwrap()).unwrap();
        Connection::open(&ledger.0).unwrap().execute_batch(schema).unwrap();
        ledger
    }

    pub(crate) fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// How often each `event_id` stands in the ledger.
    pub(crate) fn effects(&self) -> BTreeMap<String, i64> {
        self.counts("SELECT event_id, count(*) FROM ledger GROUP BY event_id")
    }

    /// A text and a number for each row of the query.
    pub(crate) fn counts(&self, sql: &str) -> BTreeMap<String, i64> {
        let database = self.open();
        let mut statement = database.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.map(Result::unwrap).collect()
    }

    pub(crate) fn number(&self, sql: &str) -> i64 {
        self.open().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Every event has exactly one effect, and the sum says the same.
    #[track_caller]
    pub(crate) fn is_once_each(&self, events: usize) {
        let effects = self.effects();
        let wrong: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
        assert!(wrong.is_empty(), "not once: {wrong:?}");
        assert_eq!(effects.len(), events, "lost or made up");
        assert_eq!(self.number("SELECT balance FROM account"), events as i64);
    }

    /// Writes beside the server, as nobody should but a test that repairs what it broke.
    pub(crate) fn execute(&self, sql: &str) {
        let database = Connection::open(&self.0).unwrap();
        database.busy_timeout(super::FOREVER).unwrap();
        database.execute_batch(sql).unwrap();
    }

    fn open(&self) -> Connection {
        let database =
            Connection::open_with_flags(&self.0, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
        database.busy_timeout(super::FOREVER).unwrap();
        database
    }
}
