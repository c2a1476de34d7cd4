//! Fills the database of a server that was started once, and is not running.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use hapax_core::SourceName;
use hapax_core::json::Pointer;
use hapax_core::log_buckets::bucket_of;
use hapax_core::search::SearchFields;
use hapax_core::store::{Gauges, MERGES, MINUTE_SECONDS, Tallies, TallyKind, TrafficCounts};
use rusqlite::{Connection, Transaction, params_from_iter};
use uuid::Uuid;

use crate::shared::server::{Server, Setup};
use crate::{Options, Seeded};

/// The time that the events span: a week.
const SPAN_MICROS: i64 = 7 * 86_400 * 1_000_000;

/// Events of each rare kind.
const RARE: u64 = 12;

/// One in this many events has a copy.
const COPIED_EVERY: u64 = 50;

/// The states of jobs, as the database stores them.
const READY: i64 = 0;
const DONE: i64 = 2;
const STALE: i64 = 3;
const DEAD: i64 = 4;
const HELD: i64 = 5;
const REVIEW: i64 = 7;

/// The field that every source indexes.
const SEARCHED: &str = "/data/object/id";

/// The value of that field in one event, in the middle of the time span.
pub(crate) const RARE_VALUE: &str = "po_of_one_event";

/// Sources with a pull handler whose jobs no worker claims. The first line belongs to the source that new
/// events arrive at, whose table comes just before it in the config.
pub(crate) fn tables(sources: u64) -> String {
    let search = format!("search = [{SEARCHED:?}]\n");
    let source = |name: String| {
        format!(
            "[sources.{name}]\nprovider = \"stripe\"\nsecrets = [\"whsec_of_{name}_0123456789\"]\n{search}\
             [sources.{name}.handlers.work]\npull = true\n"
        )
    };
    [search.clone()].into_iter().chain(names(sources).map(source)).collect()
}

fn names(sources: u64) -> impl Iterator<Item = String> {
    (1..=sources).map(|n| format!("source-{n}")).chain(["rare".to_owned()])
}

/// The fields of [`tables`].
fn fields(sources: u64) -> anyhow::Result<SearchFields> {
    let pointer = Pointer::parse(SEARCHED).context("a pointer")?;
    let all = names(sources).chain(["stripe".to_owned()]);
    Ok(SearchFields::new(all.map(|name| (SourceName::new(name), vec![pointer.clone()]))))
}

/// Fills the database of `directory`, or copies one that an earlier run has kept.
pub(crate) fn prepare(
    options: &Options,
    directory: &Path,
    setup: &Setup,
) -> anyhow::Result<Seeded> {
    let Some(kept) = &options.keep else {
        fill(options, directory, setup)?;
        return Seeded::read(options, directory);
    };
    let Options { events, waiting, dead, sources, .. } = options;
    let filled = kept.join(format!("see-{events}-{waiting}-{dead}-{sources}"));
    if !filled.exists() {
        let unfinished = filled.with_extension("unfinished");
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished).context("removing a database that is half filled")?;
        }
        fill(options, &unfinished, setup)?;
        fs::rename(&unfinished, &filled).context("keeping the database")?;
    }
    let (from, to) = (filled.join("data"), directory.join("data"));
    fs::create_dir_all(&to).context("making the data directory")?;
    for file in fs::read_dir(&from).context("listing the kept files")? {
        let file = file?.path();
        let copy = to.join(file.file_name().unwrap_or_default());
        fs::copy(&file, &copy).with_context(|| format!("copying {}", file.display()))?;
        // The disk must not be busy with the copy while it is measured.
        fs::File::open(&copy)?.sync_all().context("syncing the copy")?;
    }
    Seeded::read(options, directory)
}

impl Seeded {
    /// The event in the middle, by our id: the keys of these events are not in the key index.
    fn read(options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let conn = Connection::open(directory.join("data").join("hapax.db")).context("opening")?;
        let sql = "SELECT id, received_at FROM hapax_event WHERE seq = ?1";
        let (id, middle) = conn.query_row(sql, [i64::try_from(options.events / 2)?], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
        Ok(Self { event: Uuid::from_bytes(id).to_string(), middle })
    }
}

/// Starts the server once, which makes the tables, and fills them.
fn fill(options: &Options, directory: &Path, setup: &Setup) -> anyhow::Result<()> {
    drop(Server::hapax(&options.place.hapax, directory, setup)?);
    let mut conn = Connection::open(directory.join("data").join("hapax.db")).context("opening")?;
    conn.execute_batch("PRAGMA synchronous = OFF")?;
    let tx = conn.transaction()?;
    for n in 1..=options.sources + 1 {
        let source = match n > options.sources {
            true => "rare".to_owned(),
            false => format!("source-{n}"),
        };
        let pair = i64::try_from(n)?;
        tx.execute(
            "INSERT OR REPLACE INTO hapax_pair (pair, tenant, source) VALUES (?1, 'default', ?2)",
            (pair, &source),
        )?;
        tx.execute(
            "INSERT OR IGNORE INTO hapax_handler (source, name) VALUES (?1, 'work')",
            [&source],
        )?;
        tx.execute(
            "INSERT INTO hapax_lane (lane, pair, handler)
             VALUES (?1, ?1, (SELECT handler FROM hapax_handler WHERE source = ?2 AND name = 'work'))",
            (pair, &source),
        )?;
    }
    let now = hapax_core::Timestamp::now().as_microsecond();
    let first = now - SPAN_MICROS;
    let step = SPAN_MICROS / i64::try_from(options.events.max(1))?;
    let fields = fields(options.sources)?;
    let sources: Vec<SourceName> = names(options.sources).map(SourceName::new).collect();
    let body = |value: &str| {
        format!(r#"{{"data":{{"object":{{"id":"{value}"}}}},"pad":"{}"}}"#, "x".repeat(950))
    };
    {
        let mut event = tx.prepare(
            "INSERT INTO hapax_event (seq, id, pair, event_id, received_at, body_hash, state, review)
             VALUES (?1, ?2, ?3, ?4, ?5, zeroblob(16), 0, 0)",
        )?;
        let mut content = tx.prepare(
            "INSERT INTO hapax_body (seq, event_type, request_id, secret, headers, body)
             VALUES (?1, ?2, zeroblob(16), 0, '', ?3)",
        )?;
        let mut job = tx.prepare(
            "INSERT INTO hapax_job (event_seq, lane, state, due_at, steps, attempt)
             VALUES (?1, ?2, ?3, ?4, ?5, 1)",
        )?;
        let mut indexed =
            tx.prepare("INSERT INTO hapax_search_value (seq, hash) VALUES (?1, ?2)")?;
        let mut copy = tx.prepare(
            "INSERT INTO hapax_arrival (event_seq, received_at, request_id, conflict, secret)
             VALUES (?1, ?2, zeroblob(16), 0, 0)",
        )?;
        for n in 1..=options.events {
            let seq = i64::try_from(n)?;
            let at = first + step * seq;
            let kind = Kind::of(options, n);
            let pair = match kind == Kind::RareSource {
                true => options.sources + 1,
                false => 1 + n % options.sources,
            };
            let pair = i64::try_from(pair)?;
            let event_type = if kind == Kind::RareType { "payout.rare" } else { "payout.paid" };
            let id = format!("evt_seed_{n}");
            event.execute((seq, id_of(at, n), pair, id, at))?;
            // Customers have many events each.
            let value = match n == options.events / 2 {
                true => RARE_VALUE.to_owned(),
                false => format!("po_{}", n % 10_000),
            };
            let body = body(&value);
            content.execute((seq, event_type, body.as_bytes()))?;
            let source = &sources[usize::try_from(pair - 1)?];
            for hash in fields.values_of(source, body.as_bytes()) {
                indexed.execute((seq, &hash.0[..]))?;
            }
            let (state, steps) = kind.job();
            // Waiting jobs are due tomorrow, so that no worker claims them.
            let due = if state == READY { now + 86_400_000_000 } else { at };
            job.execute((seq, pair, state, due, steps))?;
            if n.is_multiple_of(COPIED_EVERY) {
                copy.execute((seq, at + 1))?;
            }
        }
    }
    tx.execute(
        "UPDATE hapax_meta SET value = ?1 WHERE name IN ('last_seq', 'merged_through')",
        [i64::try_from(options.events)?],
    )?;
    tx.execute(
        "INSERT INTO hapax_search_mark (fields, through) VALUES (?1, ?2)",
        (&fields.fingerprint().0[..], i64::try_from(options.events)?),
    )?;
    fill_figures(&tx, options, now / 1_000_000)?;
    tx.commit()?;
    Ok(())
}

/// The figures of each source over the same time: by the minute for two days, by the hour before.
fn fill_figures(tx: &Transaction<'_>, options: &Options, now: i64) -> anyhow::Result<()> {
    let [(_, hour, minutes_kept), _] = MERGES;
    let spans = [(hour, SPAN_MICROS / 1_000_000, minutes_kept), (MINUTE_SECONDS, minutes_kept, 0)];
    let columns = [&TrafficCounts::COLUMNS[..], &Gauges::COLUMNS[..]].concat();
    let mut row = tx.prepare(&format!(
        "INSERT INTO hapax_traffic (width, start, source, node, tallies, {}) VALUES ({})",
        columns.join(", "),
        vec!["?"; 5 + columns.len()].join(", ")
    ))?;
    for (width, oldest, newest) in spans {
        let new = u64::try_from(width)?;
        let mut tallies = Tallies::default();
        for (kind, millis) in
            [(TallyKind::Ack, 2), (TallyKind::Wait, 30), (TallyKind::Processing, 40)]
        {
            for part in 1..=20 {
                let took = std::time::Duration::from_millis(millis * part);
                tallies.count(kind, bucket_of(took), 1 + new / 20);
            }
        }
        let mut start = now - oldest + (oldest - now).rem_euclid(width);
        while start + width <= now - newest {
            let counts = TrafficCounts {
                new,
                copies: new / 50,
                succeeded: new,
                ack_micros: new * 20_000,
                ..TrafficCounts::default()
            };
            let gauges = Gauges { last_arrival: start.unsigned_abs(), ..Gauges::default() };
            let numbers = counts.numbers().into_iter().chain(gauges.numbers());
            for source in names(options.sources) {
                let mut values: Vec<rusqlite::types::Value> = vec![
                    width.into(),
                    start.into(),
                    source.into(),
                    vec![0; 16].into(),
                    tallies.bytes().into(),
                ];
                values.extend(numbers.clone().map(Into::into));
                row.execute(params_from_iter(values))?;
            }
            start += width;
        }
    }
    Ok(())
}

/// The outcome of an event.
#[derive(PartialEq, Eq)]
enum Kind {
    Waiting,
    Dead,
    Failed,
    Stale,
    Held,
    Review,
    RareType,
    RareSource,
    Processed,
}

impl Kind {
    /// The newest events wait. Events of the rare kinds are spread evenly over the rest.
    fn of(options: &Options, n: u64) -> Self {
        if n + options.waiting > options.events {
            return Self::Waiting;
        }
        let every = |count: u64, at: u64| {
            let gap = (options.events / count.max(1)).max(1);
            count > 0 && n % gap == at % gap
        };
        match () {
            () if every(options.dead, 1) => Self::Dead,
            () if every(RARE, 2) => Self::Failed,
            () if every(RARE, 3) => Self::Stale,
            () if every(RARE, 4) => Self::Held,
            () if every(RARE, 5) => Self::Review,
            () if every(RARE, 6) => Self::RareType,
            () if every(RARE, 7) => Self::RareSource,
            () => Self::Processed,
        }
    }

    /// The state of its job, and how many steps of the schedule are used.
    fn job(&self) -> (i64, i64) {
        match self {
            Self::Waiting => (READY, 0),
            Self::Failed => (READY, 1),
            Self::Dead => (DEAD, 7),
            Self::Stale => (STALE, 0),
            Self::Held => (HELD, 0),
            Self::Review => (REVIEW, 0),
            Self::RareType | Self::RareSource | Self::Processed => (DONE, 0),
        }
    }
}

/// An id as the store makes them: of version 7, with the number of the row at its end.
fn id_of(at: i64, n: u64) -> [u8; 16] {
    let millis = u128::try_from(at / 1_000).unwrap_or(0);
    let id = (millis << 80) | (7 << 76) | (2 << 62) | u128::from(n);
    id.to_be_bytes()
}
