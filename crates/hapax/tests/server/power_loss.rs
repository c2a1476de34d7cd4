//! Power loss at any moment: every answered request is on disk, and no change is there in part.
//!
//! The real server handles a small load under strace. Disk images are generated from the recorded
//! system calls, as a power loss could leave them (`hapax_sim::powerloss`). Each image is opened
//! with the store of this build, and everything answered before the cut must be in it.
//!
//! `HAPAX_POWER_LOSS_IMAGES=5000` generates that many images per recording;
//! `HAPAX_POWER_LOSS_SEED=7` generates others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use hapax_core::ledger::IDEMPOTENCY_KEY;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::store::{ArrivalInfo, Ingest, Store as _, Verdict};
use hapax_core::{Arrival, Receipt, Source, Timestamp, Verified, verify};
use hapax_sim::powerloss::{Disk, DiskStep, Recording, SeededRng};
use hapax_store::{SqliteOptions, SqliteStore};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::app::App;
use crate::support::charges::{Charge, api, is_replay, proxy};
use crate::support::ledger::{self, Ledger};
use crate::support::upstream::{Reply, Upstream};
use crate::support::{Answer, House, Sender, Server, cannot_run, until};

/// Sources with their secrets: one with an SQL handler, one sync source, one whose handler is an
/// app. The claims of the app's jobs are commits without a sync.
const SOURCES: [(&str, &str); 3] =
    [("stripe", "whsec_async"), ("waits", "whsec_sync"), ("calls", "whsec_calls")];

/// Checkpoints, merges and moves of keys happen many times within the load.
pub(crate) const SMALL: &str =
    "sqlite.checkpoint_pages=30,sqlite.log_pages=80,sqlite.fresh_keys=25,sqlite.young_keys=60";

/// Merges and moves of keys happen many times, without checkpoints on another thread, which would
/// meet the faults too.
const SMALL_KEYS: &str = "sqlite.fresh_keys=25,sqlite.young_keys=60";

/// Images per recording, unless the environment says otherwise.
const IMAGES: usize = 400;

/// About how many steps a recovery takes.
const RECOVERY_STEPS: usize = 100;

/// Events of each client; there are three clients.
const EVENTS: usize = 40;

/// An answer, and the step of the recording at which it was sent.
struct Answered {
    at: usize,
    what: What,
}

enum What {
    Event {
        event_id: String,
        id: String,
        processed: bool,
    },
    /// The answer of the app behind the proxy was stored under this key.
    Kept(String),
}

/// One recorded run.
struct Run {
    house: House,
    app: App,
    upstream: Upstream,
    /// The disk before the run.
    disk: Disk,
    recording: Recording,
    answered: Vec<Answered>,
    /// Every event that was sent, with its source and body.
    events: BTreeMap<String, (&'static str, String)>,
    receipts: Vec<Receipt>,
}

fn config(app: &App, upstream: &Upstream, sync_timeout: &str) -> String {
    let sql = |handler: &str| {
        let effect = ledger::effect(handler);
        format!("timeout = \"10s\"\nsql = \"\"\"{effect}\"\"\"\n")
    };
    let [stripe, waits, calls] = SOURCES.map(|(name, secret)| {
        format!("[sources.{name}]\nprovider = \"stripe\"\nsecrets = [\"{secret}\"]\n")
    });
    format!(
        "{stripe}[sources.stripe.handlers.fee]\n{}\
         {waits}mode = \"sync\"\nsync_timeout = \"{sync_timeout}\"\n[sources.waits.handlers.fee]\n{}\
         {calls}[sources.calls.handlers.call]\nhttp = \"{}\"\n{}",
        sql("fee"),
        sql("fee"),
        app.url(),
        proxy(&upstream.url(), "lease = \"60s\""),
    )
}

fn sender(source: &str) -> Sender {
    let (name, secret) = SOURCES.iter().find(|(name, _)| *name == source).expect("a source");
    Sender::new("stripe", secret, &format!("/webhooks/{name}"))
}

/// A body of some length, so that rows cross pages.
fn body(event_id: &str, length: usize) -> String {
    let pad = "x".repeat(length);
    format!(
        r#"{{"id":"{event_id}","object":"event","type":"payout.paid","data":{{"pad":"{pad}"}}}}"#
    )
}

impl Run {
    /// Records a run. `fault` makes system calls fail. With a fault, an earlier start that is not recorded
    /// creates the tables, so that the faults hit the work and not the creation. `None` if tracing is not
    /// possible here.
    fn record(settings: &str, fault: Option<&str>) -> Option<Self> {
        let app = App::new(|_| 200);
        let upstream = Upstream::new(|asked| {
            let key = asked.header(IDEMPOTENCY_KEY.as_str()).expect("a key");
            Reply::created(format!("charged {key}."))
        });
        // A job whose commit failed waits for the end of its lease: no client waits that long.
        let sync_timeout = if fault.is_some() { "500ms" } else { "30s" };
        let house = House::new(&config(&app, &upstream, sync_timeout));
        Ledger::create(&house, ledger::SCHEMA);
        if fault.is_some() {
            house.start().stop();
        }
        Self::record_in(house, app, upstream, settings, fault)
    }

    fn record_in(
        house: House,
        app: App,
        upstream: Upstream,
        settings: &str,
        fault: Option<&str>,
    ) -> Option<Self> {
        let disk = Disk::at(house.path());
        let scratch = scratch();
        let log = scratch.path().join("strace");
        let mut tracer = vec!["strace".to_owned()];
        tracer.extend(Recording::arguments(&log, fault));
        let server = match house.start_under(&tracer, &[("HAPAX_TEST_SETTINGS", settings)]) {
            Ok(server) => server,
            Err(why) => {
                cannot_run("power loss", &format!("tracing the server: {why}"));
                return None;
            }
        };
        let load = Load::default();
        load.send(&server);
        server.stop();
        let recording = Recording::read(&log, house.path());
        let ids = load.ids.into_inner().unwrap();
        let events = load.events.into_inner().unwrap();
        let receipts =
            events.iter().map(|(event_id, (source, body))| receipt(source, event_id, body));
        let mut run = Self {
            house,
            app,
            upstream,
            disk,
            answered: Vec::new(),
            recording,
            receipts: receipts.collect(),
            events,
        };
        run.answered = run.read_answers(&ids);
        Some(run)
    }

    /// The answers in the recording. A client that has its answer proves that the answer was sent,
    /// so the recording must contain every answer.
    fn read_answers(&self, ids: &BTreeMap<String, String>) -> Vec<Answered> {
        let mut answered = Vec::new();
        for (at, step) in self.recording.steps().iter().enumerate() {
            let DiskStep::Send(bytes) = step else { continue };
            let text = String::from_utf8_lossy(bytes);
            if let Some(json) = text.find("{\"decision\"").map(|from| &text[from..])
                && let Some(answer) =
                    serde_json::Deserializer::from_str(json).into_iter::<Value>().next()
            {
                let answer = answer.expect("a whole answer");
                let id = answer["id"].as_str().expect("our id").to_owned();
                let processed = answer["status"] == "processed";
                let event_id = ids.get(&id).expect("the client has it too").clone();
                answered.push(Answered { at, what: What::Event { event_id, id, processed } });
            }
            if let Some(from) = text.find("charged ") {
                let key = text[from + 8..].split('.').next().unwrap().to_owned();
                answered.push(Answered { at, what: What::Kept(key) });
            }
        }
        let events: BTreeSet<&str> = answered.iter().filter_map(|one| one.event_id()).collect();
        assert_eq!(events.len(), self.events.len(), "not every answer was found");
        assert!(answered.iter().any(|one| matches!(&one.what, What::Kept(_))));
        answered
    }

    /// The steps at which a sync failed.
    fn faults(&self) -> Vec<usize> {
        let steps = self.recording.steps().iter().enumerate();
        let failed = steps.filter(
            |(_, step)| matches!(step, DiskStep::Ended { result: Err(why), .. } if why.contains("EIO")),
        );
        failed.map(|(at, _)| at).collect()
    }

    /// The ends of the syncs shortly after each fault: only these syncs order the writes of a
    /// recovery.
    fn syncs_of_recovery(&self) -> Vec<usize> {
        let steps = self.recording.steps();
        let ends_sync = |at: &usize| match &steps[*at] {
            DiskStep::Ended { step, result: Ok(_) } => matches!(steps[*step], DiskStep::Sync(_)),
            _ => false,
        };
        let after = |fault: usize| fault..(fault + RECOVERY_STEPS).min(steps.len());
        self.faults().into_iter().flat_map(|fault| after(fault).filter(ends_sync)).collect()
    }

    /// Generates images and checks each; returns the errors.
    fn judge(&self, images: usize) -> Vec<String> {
        let seed = number("HAPAX_POWER_LOSS_SEED").unwrap_or(1);
        let steps = self.recording.steps().len();
        let first = self.answered[0].at;
        let recovery = self.syncs_of_recovery();
        let wrong = Mutex::new(Vec::new());
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for part in 0..2 {
                let (wrong, next, recovery) = (&wrong, &next, &recovery);
                scope.spawn(move || {
                    let mut draw = SeededRng::new((seed * 2 + part) as u64);
                    // Some cuts are right after an answer, some in the recovery from a fault, and
                    // the others anywhere, even before the first answer.
                    let mut cuts: Vec<usize> = (0..images / 2)
                        .map(|n| match n % 3 {
                            0 => self.answered[draw.below(self.answered.len())].at + 1,
                            1 if !recovery.is_empty() => recovery[draw.below(recovery.len())] + 1,
                            _ => first / 2 + draw.below(steps - first / 2) + 1,
                        })
                        .collect();
                    cuts.sort_unstable();
                    let mut disk = self.disk.clone();
                    for cut in cuts {
                        disk.advance(self.recording.steps(), cut);
                        let image = scratch();
                        disk.image(&mut draw, image.path());
                        next.fetch_add(1, Ordering::Relaxed);
                        if let Err(why) = self.check(image.path(), cut) {
                            let why = format!("power lost after step {cut} of {steps}: {why}");
                            wrong.lock().unwrap().push(why);
                        }
                    }
                });
            }
        });
        assert_eq!(next.into_inner(), images / 2 * 2);
        wrong.into_inner().unwrap()
    }

    /// Opens an image and checks that everything answered before `cut` is in it.
    fn check(&self, image: &Path, cut: usize) -> Result<(), String> {
        let data = image.join("data");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = SqliteStore::open(SqliteOptions::new(&data)).map_err(|e| e.to_string())?;
            let checked = self.check_rows(store.path(), cut);
            let checked = match checked {
                Ok(()) => self.check_copies(&store, cut).await,
                wrong => wrong,
            };
            store.close().await;
            checked
        })?;
        let sound =
            query(&data.join("hapax.db"), "SELECT integrity_check FROM pragma_integrity_check")?;
        if sound != ["ok"] { Err(format!("not sound: {sound:?}")) } else { Ok(()) }
    }

    /// Checks that jobs and their effects are there together or not at all, and that every event
    /// reported as processed is processed.
    fn check_rows(&self, database: &Path, cut: usize) -> Result<(), String> {
        let processed: BTreeSet<String> = query(
            database,
            "SELECT event_id FROM hapax_processed_events
             WHERE status = 'processed' AND source <> 'calls'",
        )?
        .into_iter()
        .collect();
        let effects = query(database, "SELECT event_id FROM ledger")?;
        let balance = query(database, "SELECT CAST(balance AS TEXT) FROM account")?;
        let once: BTreeSet<String> = effects.iter().cloned().collect();
        if once.len() != effects.len() || balance != [effects.len().to_string()] {
            return Err(format!("effects twice: {effects:?}, balance {balance:?}"));
        }
        if once != processed {
            let differ: Vec<_> = once.symmetric_difference(&processed).collect();
            return Err(format!("effects and done differ: {differ:?}"));
        }
        let kept: BTreeSet<String> =
            query(database, "SELECT key FROM hapax_reservation WHERE status IS NOT NULL")?
                .into_iter()
                .collect();
        for one in self.answered.iter().filter(|one| one.at < cut) {
            match &one.what {
                What::Event { event_id, processed: true, .. }
                    if self.events[event_id].0 != "calls" && !processed.contains(event_id) =>
                {
                    return Err(format!("{event_id} was processed and is not"));
                }
                What::Event { .. } => {}
                What::Kept(key) if !kept.contains(key) => {
                    return Err(format!("the answer to {key} was kept and is not"));
                }
                What::Kept(_) => {}
            }
        }
        Ok(())
    }

    /// Sends every event again, twice. An answered event is a duplicate under its id. Any other
    /// event is accepted or a duplicate the first time, and a duplicate the second time.
    async fn check_copies(&self, store: &SqliteStore, cut: usize) -> Result<(), String> {
        let mut answered = BTreeMap::new();
        for one in self.answered.iter().filter(|one| one.at < cut) {
            if let What::Event { event_id, id, .. } = &one.what {
                answered.insert(event_id.as_str(), id.as_str());
            }
        }
        let durable: BTreeSet<String> =
            query(store.path(), "SELECT event_id FROM hapax_processed_events")?
                .into_iter()
                .collect();
        let first = self.ingest(store).await?;
        let again = self.ingest(store).await?;
        for ((receipt, first), again) in self.receipts.iter().zip(&first).zip(&again) {
            let event_id = &*receipt.key().event_id;
            let known = matches!(first, Verdict::Duplicate(_));
            let id = first.id().to_string();
            if known != durable.contains(event_id) {
                return Err(format!("{event_id} is {first:?}, and a row of it: {}", !known));
            }
            if let Some(expected) = answered.get(event_id)
                && (!known || *expected != id)
            {
                return Err(format!("{event_id} was answered as {expected} and is {first:?}"));
            }
            if !matches!(again, Verdict::Duplicate(known) if known.id.to_string() == id) {
                return Err(format!("{event_id} is {first:?} and then {again:?}"));
            }
        }
        Ok(())
    }

    async fn ingest(&self, store: &SqliteStore) -> Result<Vec<Verdict>, String> {
        let via = ArrivalInfo {
            received_at: Timestamp::now(),
            request_id: uuid::Uuid::nil(),
            remote: None,
            secret: 0,
            signed_at: None,
            headers: "".into(),
        };
        let jobs = vec![Vec::new(); self.receipts.len()];
        let ingest = Ingest { receipts: self.receipts.clone(), jobs, via };
        store.ingest(ingest).await.map_err(|error| error.to_string())
    }

    /// Starts the server itself on an image: the senders retry, and every event has one effect.
    fn start_on_an_image(&self, draw: &mut SeededRng) {
        let steps = self.recording.steps();
        let cut = self.answered[draw.below(self.answered.len())].at + 1;
        let mut disk = self.disk.clone();
        disk.advance(steps, cut);
        let image = scratch();
        disk.image(draw, image.path());
        let house = House::new(&config(&self.app, &self.upstream, "30s"))
            .data_dir_at(&image.path().join("data"));
        let server = house.start();
        for (event_id, (source, body)) in &self.events {
            let answer = server.ask(sender(source).request(body).bytes());
            assert!(matches!(answer.status, 200 | 202), "{event_id}: {answer:?}");
        }
        let kept: BTreeSet<&str> = self.answered[..]
            .iter()
            .filter(|one| one.at < cut)
            .filter_map(|one| match &one.what {
                What::Kept(key) => Some(key.as_str()),
                What::Event { .. } => None,
            })
            .collect();
        for key in kept {
            let answer = Charge::with_key(key).send(api(&server));
            assert!(is_replay(&answer), "{key}: {answer:?}");
        }
        let ledger = Ledger::at(&house.database());
        let open = "SELECT count(*) FROM hapax_processed_events WHERE status <> 'processed'";
        until("everything is processed", || (ledger.number(open) == 0).then_some(()));
        server.stop();
        let of_sql = self.events.values().filter(|(source, _)| *source != "calls").count();
        ledger.is_once_each(of_sql);
    }
}

/// Checks that nothing is copied into the database file from a log that may have holes on disk. A power loss
/// would leave newer pages under an older log, which few images show.
#[track_caller]
fn copies_nothing_doubtful(before: &Disk, house: &House, recording: &Recording) {
    let mut disk = before.clone();
    let (file, log) = (house.database(), house.database().with_extension("db-wal"));
    for (at, step) in recording.steps().iter().enumerate() {
        disk.advance(recording.steps(), at);
        let copies = matches!(step, DiskStep::Write { path, .. } if *path == file);
        assert!(!(copies && disk.is_doubtful(&log)), "step {at}: the log has holes on disk");
    }
}

impl Answered {
    fn event_id(&self) -> Option<&str> {
        match &self.what {
            What::Event { event_id, .. } => Some(event_id),
            What::Kept(_) => None,
        }
    }
}

/// The requests of the clients, and the answers they got.
#[derive(Default)]
struct Load {
    /// The ids of Hapax and of the senders.
    ids: Mutex<BTreeMap<String, String>>,
    events: Mutex<BTreeMap<String, (&'static str, String)>>,
    refused: AtomicBool,
}

impl Load {
    /// Runs three clients. Each sends one request after the other, and repeats each request until it is answered.
    fn send(&self, server: &Server) {
        std::thread::scope(|scope| {
            for client in 0..3 {
                scope.spawn(move || {
                    for n in 0..EVENTS {
                        let source = SOURCES[(n + client) % 3].0;
                        let event_id = format!("evt_{client}_{n}");
                        let body = body(&event_id, (n * 397 + client * 911) % 3_000);
                        self.post(server, source, &event_id, &body);
                        if n % 3 == 0 {
                            self.post(server, source, &event_id, &body);
                        }
                        if n % 4 == 0 {
                            let key = format!("key_{client}_{n}");
                            self.charge(server, &key);
                            self.charge(server, &key);
                        }
                    }
                });
            }
        });
    }

    fn post(&self, server: &Server, source: &'static str, event_id: &str, body: &str) {
        let request = sender(source).request(body).bytes();
        let answer = self.ask(|| server.ask(&request));
        // After a fault the jobs of a sync source may still be running: 202.
        let late = answer.status == 202 && self.refused.load(Ordering::Relaxed);
        assert!(answer.status == 200 || late, "{answer:?}");
        self.ids.lock().unwrap().insert(answer.id(), event_id.to_owned());
        self.events.lock().unwrap().insert(event_id.to_owned(), (source, body.to_owned()));
    }

    fn charge(&self, server: &Server, key: &str) {
        let answer = self.ask(|| Charge::with_key(key).send(api(server)));
        // After a fault the key may be in progress until its lease ends: then no answer was stored.
        assert!(answer.status == 201 || self.refused.load(Ordering::Relaxed), "{answer:?}");
    }

    fn ask(&self, mut ask: impl FnMut() -> Answer) -> Answer {
        until("it is answered", || {
            let answer = ask();
            if answer.status != 503 {
                return Some(answer);
            }
            self.refused.store(true, Ordering::Relaxed);
            None
        })
    }
}

/// The same event as a receipt, for the store.
fn receipt(source: &str, event_id: &str, body: &str) -> Receipt {
    let (_, secret) = SOURCES.iter().find(|(name, _)| *name == source).expect("a source");
    let secrets = vec![ActiveSecret::forever(Secret::new(*secret))];
    let built = Source::build(SourceSpec::new(source, "stripe", secrets)).expect("a good spec");
    let request = sender(source).request(body);
    let mut headers = HeaderMap::new();
    for (name, value) in &request.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.insert(name, HeaderValue::from_str(value).unwrap());
    }
    let url = format!("http://hooks.example.com{}", request.path);
    let arrival = Arrival { method: Method::POST, url, headers, body: Bytes::from(request.body) };
    let verified = verify(&built, &arrival, Timestamp::now()).expect("it is signed");
    let Verified::Events { mut receipts, .. } = verified else { panic!("no event: {event_id}") };
    receipts.remove(0)
}

/// The first column of each row.
pub(crate) fn query(database: &Path, sql: &str) -> Result<Vec<String>, String> {
    let read = || {
        let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
        let database = rusqlite::Connection::open_with_flags(database, flags)?;
        let mut statement = database.prepare(sql)?;
        let rows = statement.query_map([], |row| row.get(0))?;
        rows.collect::<rusqlite::Result<Vec<String>>>()
    };
    read().map_err(|error| format!("{sql}: {error}"))
}

/// A directory that is fast to sync, if there is one.
pub(crate) fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir().then(|| tempfile::tempdir_in(memory)) {
        Some(Ok(dir)) => dir,
        Some(Err(_)) | None => tempfile::tempdir().unwrap(),
    }
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().map(|value| value.parse().expect("a number"))
}

fn images() -> usize {
    number("HAPAX_POWER_LOSS_IMAGES").unwrap_or(IMAGES)
}

#[track_caller]
pub(crate) fn nothing_is_wrong(wrong: &[String], images: usize) {
    let shown = wrong.iter().take(5).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} of {images} images are wrong:\n{shown}", wrong.len());
}

#[test]
fn a_power_loss_at_any_moment_loses_nothing_that_was_answered() {
    let Some(run) = Run::record(SMALL, None) else { return };
    nothing_is_wrong(&run.judge(images()), images());
    let mut draw = SeededRng::new(1);
    for _ in 0..2 {
        run.start_on_an_image(&mut draw);
    }
}

#[test]
fn without_syncs_the_test_detects_lost_answers() {
    // The control: if this passed without syncs, the test above could not fail.
    let settings = format!("{SMALL},sqlite.unsynced=true");
    let Some(run) = Run::record(&settings, None) else { return };
    let wrong = run.judge(60);
    assert!(wrong.len() > 20, "only {} of 60 images are wrong: {wrong:?}", wrong.len());
}

#[test]
fn a_power_loss_after_a_failed_sync_loses_nothing_that_was_answered() {
    // Claims and copies are committed without a sync. The failed sync was also the sync of these
    // commits, and no later sync writes them.
    let Some(run) = Run::record(SMALL_KEYS, Some("fdatasync:error=EIO:when=9+17")) else { return };
    assert!(run.faults().len() > 3, "hardly any sync failed");
    nothing_is_wrong(&run.judge(images()), images());
    copies_nothing_doubtful(&run.disk, &run.house, &run.recording);
}

#[test]
fn a_start_after_a_failed_sync_copies_nothing_from_a_log_with_holes() {
    // The server is killed while its syncs fail. The next one reads the whole log from memory, and its own
    // syncs succeed without writing the pages that the failed ones should have written.
    let (name, secret) = SOURCES[0];
    let house =
        House::new(&format!("[sources.{name}]\nprovider = \"stripe\"\nsecrets = [\"{secret}\"]\n"));
    house.start().stop();
    let disk = Disk::at(house.path());
    let scratch = scratch();
    let log = scratch.path().join("strace");
    let start = |fault| {
        let mut tracer = vec!["strace".to_owned(), "-A".to_owned()];
        tracer.extend(Recording::arguments(&log, fault));
        house.start_under(&tracer, &[])
    };
    let server = match start(Some("fdatasync:error=EIO:when=9+")) {
        Ok(server) => server,
        Err(why) => return cannot_run("a start after a failed sync", &why),
    };
    let sender = sender("stripe");
    let mut answers = (0..40).map(|n| server.ask(sender.event(&format!("evt_{n}"))).status);
    let refused = answers.find(|status| *status != 200);
    assert_eq!(refused, Some(503), "no sync failed");
    server.kill();
    let server = start(None).expect("traced a moment ago");
    server.ask(sender.event("evt_0")).is("duplicate");
    server.ask(sender.event("evt_new")).is("accepted");
    server.kill();
    let recording = Recording::read(&log, house.path());
    let failed = |step: &DiskStep| matches!(step, DiskStep::Ended { result: Err(_), .. });
    assert!(recording.steps().iter().any(failed), "no failed sync was recorded");
    copies_nothing_doubtful(&disk, &house, &recording);
}

#[test]
fn a_power_loss_after_a_first_start_loses_nothing_that_was_answered() {
    // The directory itself is new, and so is every name in it.
    let source = SOURCES[0];
    let house = House::new(&format!(
        "[sources.{0}]\nprovider = \"stripe\"\nsecrets = [\"{1}\"]\n",
        source.0, source.1
    ));
    let mut disk = Disk::at(house.path());
    let scratch_dir = scratch();
    let log = scratch_dir.path().join("strace");
    let mut tracer = vec!["strace".to_owned()];
    tracer.extend(Recording::arguments(&log, None));
    let server = match house.start_under(&tracer, &[]) {
        Ok(server) => server,
        Err(why) => return cannot_run("power loss at the first start", &why),
    };
    let answer = server.ask(sender("stripe").event("evt_first"));
    answer.is("accepted");
    server.kill();
    let recording = Recording::read(&log, house.path());
    let steps = recording.steps();
    let sent = steps.iter().position(|step| {
        matches!(step, DiskStep::Send(bytes) if String::from_utf8_lossy(bytes).contains(&answer.id()))
    });
    disk.advance(steps, sent.expect("the answer was sent") + 1);
    let mut draw = SeededRng::new(1);
    for _ in 0..30 {
        let image = scratch();
        disk.image(&mut draw, image.path());
        let known = query(
            &image.path().join("data/hapax.db"),
            "SELECT event_id FROM hapax_processed_events",
        );
        assert_eq!(known.as_deref(), Ok(&["evt_first".to_owned()][..]));
    }
}
