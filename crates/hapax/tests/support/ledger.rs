//! A user's tables in `hapax.db`, created before the first start of the server, without any
//! constraint that would hide a second effect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::House;

/// The tables that a handler writes: a row for each event, and a sum that shows a second run.
pub(crate) const SCHEMA: &str = "
    CREATE TABLE ledger (event_id TEXT, handler TEXT, attempt INTEGER);
    CREATE TABLE account (balance INTEGER);
    INSERT INTO account VALUES (0);";

/// The statements of a handler that writes one row and increments the balance.
pub(crate) fn effect(handler: &str) -> String {
    format!(
        "INSERT INTO ledger VALUES (:event_id, '{handler}', :attempt);
         UPDATE account SET balance = balance + 1"
    )
}

/// The user's tables in a database.
pub(crate) struct Ledger(PathBuf);

impl Ledger {
    /// Creates the tables, in a data directory that no server has used yet.
    pub(crate) fn create(house: &House, schema: &str) -> Self {
        let ledger = Self(house.database());
        std::fs::create_dir_all(ledger.0.parent().unwrap()).unwrap();
        Connection::open(&ledger.0).unwrap().execute_batch(schema).unwrap();
        ledger
    }

    pub(crate) fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// The number of rows of each `event_id` in the ledger.
    pub(crate) fn effects(&self) -> BTreeMap<String, i64> {
        self.counts("SELECT event_id, count(*) FROM ledger GROUP BY event_id")
    }

    /// The rows of a query with two columns, a text and a number.
    pub(crate) fn counts(&self, sql: &str) -> BTreeMap<String, i64> {
        let database = self.open();
        let mut statement = database.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.map(Result::unwrap).collect()
    }

    pub(crate) fn number(&self, sql: &str) -> i64 {
        self.open().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Checks that every event has exactly one effect, and that the sum agrees.
    #[track_caller]
    pub(crate) fn is_once_each(&self, events: usize) {
        let effects = self.effects();
        let wrong: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
        assert!(wrong.is_empty(), "not once: {wrong:?}");
        assert_eq!(effects.len(), events, "lost or made up");
        assert_eq!(self.number("SELECT balance FROM account"), events as i64);
    }

    /// Writes while the server runs. Only a test that repairs its own damage calls this.
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
