//! The functions and views of the schema `hapax`: one file each, and one version for all of them.
//!
//! A node replaces all functions and views in one transaction, and only if its version is higher than the one
//! that the database records ([`super::migrate`]). So an older node that starts later changes nothing, and a
//! fix is a change of one file. Nodes of the previous version keep calling the functions that they know. So a
//! function whose arguments or columns change gets a new name, and the old one stays while any node may call
//! it. The same holds for views, to which columns can only be added at the end.
//!
//! Locks: a job's row first, then the mark of its resource. A transaction that goes on to ready other
//! jobs skips the locked ones, and a claim skips every locked row. A claim never waits for a lock, so a
//! transaction that stays open delays only the rows that it has locked. A later claim finds the skipped
//! rows. Each function that a node calls is one statement, and so one commit. Functions that users call
//! inside their own transactions lock only the rows that they change: one job, the mark of its
//! resource, one key.
//!
//! Time: `now_at` is for tests; without it the clock is the database's.

use hapax_core::tuned;

use super::migrate::checksum;

/// The version of the functions and views of this build. Raise the version with the first change after a
/// release.
pub(super) const VERSION: i32 = 1;

/// The versions that were released, with the checksum of their text. A release adds its own line.
#[cfg(test)]
const RELEASED: &[(i32, &str)] = &[];

/// One file.
struct Definition {
    name: &'static str,
    sql: &'static str,
}

macro_rules! definitions {
    ($folder:literal: $($name:ident),+ $(,)?) => {
        &[$(Definition {
            name: stringify!($name),
            sql: include_str!(concat!($folder, "/", stringify!($name), ".sql")),
        }),+]
    };
}

/// All functions, in the order of creation: the bodies of the first ones are resolved by PostgreSQL
/// when they are created.
const FUNCTIONS: &[Definition] = definitions!["functions":
    event_state, job_state, order_policy, order_verdict, review_reason, workplace,
    delivery_state, delivery_rank, delivery_status, delivery_id, is_over, commit_slack, replay_lock,
    last_job, rank, status, job_id, first_due, open_reason, rate_next_at, time_text,
    key_margin, byte_margin, fence_floor,
    abandon, add_tallies, admit, admit_handlers, link_messages, announce, batch_keys, begin_sequence, blocking_delivery, check_in,
    cancel_orphans, change_endpoint, change_message, change_source_secrets, claim, commit_without_sync, complete, count_copies,
    count_keys, count_plan, count_usage, create_endpoint, create_plan, day_after, decide, delete_tenant,
    discard,
    done, done_all, due_endpoints, due_lanes, end_delivery_leases, end_hold, end_holds, end_leases,
    endpoint_lock, envelope, erase, erase_events, erase_messages, exchange, expire, expire_deliveries, expire_delivery, fail, failed,
    finish, finish_key, first_fence, merge_usage_of, forget, forget_marks, forget_messages, give_back,
    guard, has_ample_room, has_room, hold, hurry, index_values,
    ingest, is_held, is_reserved, judge_circuit, key_hash, key_lock,
    lane_of, lease_jobs, lock_marks, lose, lose_delivery, make_partition, message_fingerprint,
    next_due, next_fence, note_answer, note_attempt, note_death, note_delivery_attempt,
    note_ended, once, open_publishers,
    pause_lock, plan_bounds, prepare_marks, publish, publish_deaths, publish_deaths_of, publish_messages,
    publish_or_raise, publish_own, publish_standing, ready_next,
    ready_next_delivery, refuse_handler, renew, replay, replay_delivery, reservation_came,
    reservation_changed, reservation_went, reserve, reserve_key, run_plan, seal_of, send_again,
    set_aside, set_paused, settle, settle_attempt, escaped_text, exclude_replays, silence_alert, skip_delivery, strip, strip_each,
    strip_messages, strip_run, take_unordered, take_deliveries, take_in_order, take_search_mark, take_slice, merge_usage, to_review,
    try_mark, unpark, wake_parked, wants_message, wants_own, worked_for, works_for, write_alerts, write_jobs, write_message,
];

const VIEWS: &[Definition] =
    definitions!["views": processed_events, arrivals, attempts, dead_letters, deliveries];

/// The SQL that runs before the functions, and before each migration step.
pub(super) const BEFORE: &str = include_str!("sql/objects_before.sql");

/// The SQL that takes the rights of other roles from the objects that were created since [`BEFORE`].
pub(super) const NEW_RIGHTS: &str = include_str!("sql/new_rights.sql");

/// The SQL that runs after the functions, and after each migration step.
pub(super) const AFTER: &str =
    concat!(include_str!("sql/after_functions.sql"), include_str!("sql/new_rights.sql"));

/// The rights on the functions that the views call.
const VIEW_FUNCTIONS: &str = include_str!("sql/view_functions.sql");

/// All of them, with a version.
#[derive(Debug, Clone)]
pub(super) struct FunctionSet {
    pub(super) version: i32,
    text: String,
}

impl FunctionSet {
    /// The functions of this build.
    pub(super) fn ours() -> Self {
        let mut text = String::new();
        for Definition { name, sql } in FUNCTIONS.iter().chain(VIEWS) {
            text.push_str(&format!("\n-- {name}\n{sql}"));
        }
        Self { version: VERSION, text }
    }

    pub(super) fn checksum(&self) -> String {
        checksum(&self.text)
    }

    /// Replaces every function and view, in the transaction that it is run in. Keeps: the version only
    /// grows. The row of the version decides: the transaction fails if this version is not higher.
    pub(super) fn script(&self) -> String {
        let version = self.version;
        let checksum = self.checksum();
        // Tests shorten the time that a circuit stays open: otherwise a test that restarts its receiver would
        // wait for minutes. The checksum is that of the original text, so that programs with and without this
        // setting share a database.
        let circuit_us = tuned!("circuit.open_ms", 60_000_u64) * 1_000;
        let minute = "minute CONSTANT bigint := ";
        let text =
            self.text.replace(&format!("{minute}60000000;"), &format!("{minute}{circuit_us};"));
        format!(
            "{BEFORE}
SET LOCAL check_function_bodies = off;
DO $version$
BEGIN
    INSERT INTO hapax.function_version AS v (version, checksum) VALUES ({version}, '{checksum}')
    ON CONFLICT (one) DO UPDATE
    SET version = excluded.version, checksum = excluded.checksum, at = excluded.at
    WHERE v.version < excluded.version;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the functions of this database have version {version} or a higher one';
    END IF;
END $version$;
{text}
{AFTER}
{VIEW_FUNCTIONS}"
        )
    }
}

#[cfg(test)]
impl FunctionSet {
    /// A set of another version: this build's functions, followed by this text.
    pub(super) fn with(version: i32, more: &str) -> Self {
        Self { version, text: format!("{}\n{more}", Self::ours().text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_a_function_or_view_is_applied() {
        // A file that is in no list could be edited without any effect.
        for (folder, listed) in [("functions", FUNCTIONS), ("views", VIEWS)] {
            let path = format!("{}/src/postgres/{folder}", env!("CARGO_MANIFEST_DIR"));
            let mut files: Vec<String> = std::fs::read_dir(path)
                .expect("reads")
                .map(|file| file.expect("reads").file_name().to_string_lossy().into_owned())
                .collect();
            let mut named: Vec<String> =
                listed.iter().map(|one| format!("{}.sql", one.name)).collect();
            files.sort();
            named.sort();
            assert_eq!(files, named);
        }
    }

    #[test]
    fn a_file_replaces_the_function_that_it_is_named_after() {
        // `CREATE` without `OR REPLACE` fails on the second version, and a second definition in a file
        // is not found by its name.
        for Definition { name, sql } in FUNCTIONS {
            assert!(sql.contains(&format!("CREATE OR REPLACE FUNCTION hapax.{name}(")), "{name}");
            let created = sql.lines().filter(|line| line.starts_with("CREATE ")).count();
            assert_eq!(created, 1, "{name}");
        }
        for Definition { name, sql } in VIEWS {
            assert!(sql.contains(&format!("CREATE OR REPLACE VIEW hapax.{name} ")), "{name}");
        }
    }

    #[test]
    fn states_have_names_in_every_statement() {
        // A bare number says nothing to a reader, and a wrong one is not noticed.
        let statements = [
            include_str!("sql/claimed.sql"),
            include_str!("sql/in_review.sql"),
            include_str!("sql/insert_events.sql"),
            include_str!("sql/insert_jobs.sql"),
            include_str!("sql/known.sql"),
            include_str!("sql/lanes.sql"),
        ];
        let columns = ["state", "review", "policy", "workplace", "says"];
        let texts = FUNCTIONS.iter().chain(VIEWS).map(|one| one.sql).chain(statements);
        for line in texts.flat_map(str::lines).filter(|line| !line.trim_start().starts_with("--")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let compares = |[column, operator, value]: &[&str; 3]| {
                columns.iter().any(|name| column.rsplit('.').next() == Some(name))
                    && ["=", "<>", ">", "<", "IN"].contains(operator)
                    && value
                        .trim_start_matches('(')
                        .starts_with(|first: char| first.is_ascii_digit())
            };
            let bare = words.windows(3).any(|three| compares(&[three[0], three[1], three[2]]));
            assert!(!bare, "{line}");
        }
    }

    #[test]
    fn a_change_after_a_release_raises_the_version() {
        // A database that already has this version would never get the change.
        let ours = FunctionSet::ours();
        match RELEASED.last() {
            Some((version, checksum)) if *version == ours.version => {
                assert_eq!(*checksum, ours.checksum(), "raise VERSION");
            }
            Some((version, _)) => assert_eq!(ours.version, version + 1),
            None => assert_eq!(ours.version, 1),
        }
    }
}
