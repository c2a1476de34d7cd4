//! The usage of each caller of an API, as the open transaction of the writer has read and changed it. Most batches
//! hold many keys of few callers: each caller's row is read once and written once per batch, instead of in each
//! statement that changes a key.
//!
//! Only new keys and stored answers are counted here. Triggers on `hapax_reservation` count every other change, so
//! [`KeyUsage::write`] must run before such a change and before the commit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use hapax_core::ledger::{Owner, Quota, Usage};
use rusqlite::{Connection, OptionalExtension, Row};

/// The usage that the open transaction has read, and what it has added.
#[derive(Debug, Default)]
pub(super) struct KeyUsage {
    callers: HashMap<Owner, Counted>,
    realms: HashMap<Box<str>, Realm>,
}

/// The usage of one caller or one API.
#[derive(Debug, Default)]
struct Counted {
    /// The usage, including what was added.
    usage: Usage,
    /// The usage that this transaction has added and not written yet.
    added: Usage,
    /// Whether the caller has any key.
    is_known: bool,
}

impl Counted {
    fn add(&mut self, more: Usage) {
        for sum in [&mut self.usage, &mut self.added] {
            sum.keys = sum.keys.saturating_add(more.keys);
            sum.bytes = sum.bytes.saturating_add(more.bytes);
        }
        self.is_known = true;
    }
}

#[derive(Debug, Default)]
struct Realm {
    counted: Counted,
    callers: u64,
}

impl KeyUsage {
    /// The quota's decision on the current usage.
    pub(super) fn judge(
        &mut self,
        conn: &Connection,
        owner: &Owner,
        quota: Quota,
        says: impl Fn(Quota, Usage, Usage, u64) -> bool,
    ) -> rusqlite::Result<bool> {
        let (caller, realm) = self.of(conn, owner)?;
        let callers = realm.callers + u64::from(!caller.is_known);
        Ok(says(quota, caller.usage, realm.counted.usage, callers))
    }

    /// Counts a new key without an answer.
    pub(super) fn add_key(&mut self, conn: &Connection, owner: &Owner) -> rusqlite::Result<()> {
        self.add(conn, owner, Usage { keys: 1, bytes: 0 })
    }

    /// Counts the answer of a key that had none.
    pub(super) fn add_bytes(
        &mut self,
        conn: &Connection,
        owner: &Owner,
        bytes: u64,
    ) -> rusqlite::Result<()> {
        self.add(conn, owner, Usage { keys: 0, bytes })
    }

    fn add(&mut self, conn: &Connection, owner: &Owner, more: Usage) -> rusqlite::Result<()> {
        let (caller, realm) = self.of(conn, owner)?;
        realm.callers += u64::from(!caller.is_known);
        realm.counted.add(more);
        caller.add(more);
        Ok(())
    }

    fn of(
        &mut self,
        conn: &Connection,
        owner: &Owner,
    ) -> rusqlite::Result<(&mut Counted, &mut Realm)> {
        if !self.callers.contains_key(owner) {
            self.callers.insert(owner.clone(), stored_caller(conn, owner)?);
        }
        let caller = self.callers.get_mut(owner).expect("the caller was just read");
        let realm = match self.realms.entry(owner.realm().into()) {
            Entry::Occupied(realm) => realm.into_mut(),
            Entry::Vacant(place) => place.insert(stored_realm(conn, owner.realm())?),
        };
        Ok((caller, realm))
    }

    /// Writes what was added, and forgets what was read.
    pub(super) fn write(&mut self, conn: &Connection) -> rusqlite::Result<()> {
        // A new caller's row adds one to the callers of its API, so the API has its row first.
        for (realm, Realm { counted, .. }) in self.realms.drain() {
            if counted.added != Usage::default() {
                conn.prepare_cached(
                    "INSERT INTO hapax_realm_usage (realm, keys, bytes, callers)
                     VALUES (?1, ?2, ?3, 0)
                     ON CONFLICT (realm) DO UPDATE
                     SET keys = keys + excluded.keys, bytes = bytes + excluded.bytes",
                )?
                .execute((
                    &realm,
                    column(counted.added.keys),
                    column(counted.added.bytes),
                ))?;
            }
        }
        for (owner, Counted { added, .. }) in self.callers.drain() {
            if added != Usage::default() {
                conn.prepare_cached(
                    "INSERT INTO hapax_key_usage (owner, realm, keys, bytes)
                     VALUES (?1, ?2, ?3, ?4)
                     ON CONFLICT (owner) DO UPDATE
                     SET keys = keys + excluded.keys, bytes = bytes + excluded.bytes",
                )?
                .execute((
                    owner.as_str(),
                    owner.realm(),
                    column(added.keys),
                    column(added.bytes),
                ))?;
            }
        }
        Ok(())
    }

    /// Forgets everything: the transaction was rolled back.
    pub(super) fn clear(&mut self) {
        self.callers.clear();
        self.realms.clear();
    }
}

fn stored_caller(conn: &Connection, owner: &Owner) -> rusqlite::Result<Counted> {
    let stored = conn
        .prepare_cached("SELECT keys, bytes FROM hapax_key_usage WHERE owner = ?1")?
        .query_row([owner.as_str()], usage)
        .optional()?;
    let is_known = stored.is_some();
    Ok(Counted { usage: stored.unwrap_or_default(), is_known, ..Counted::default() })
}

fn stored_realm(conn: &Connection, realm: &str) -> rusqlite::Result<Realm> {
    let stored = conn
        .prepare_cached("SELECT keys, bytes, callers FROM hapax_realm_usage WHERE realm = ?1")?
        .query_row([realm], |row| Ok((usage(row)?, count(row, 2)?)))
        .optional()?;
    let (usage, callers) = stored.unwrap_or_default();
    Ok(Realm { counted: Counted { usage, ..Counted::default() }, callers })
}

fn usage(row: &Row<'_>) -> rusqlite::Result<Usage> {
    Ok(Usage { keys: count(row, 0)?, bytes: count(row, 1)? })
}

fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or_default())
}

fn column(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
