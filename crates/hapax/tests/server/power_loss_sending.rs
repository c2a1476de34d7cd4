//! Power loss while messages are published and delivered: every acknowledged message is on disk whole, with
//! its delivery and its bytes. See [`super::power_loss`] for how images are generated.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;

use hapax_sim::powerloss::{Disk, DiskStep, Recording, SeededRng};
use hapax_store::{SqliteOptions, SqliteStore};
use serde_json::json;

use super::power_loss::{SMALL, nothing_is_wrong, query, scratch};
use crate::support::sink::Sink;
use crate::support::{House, cannot_run};

const CONFIG: &str = "[outbound]\nallow = [\"127.0.0.0/8\"]\n";

/// Messages of each client; there are three clients.
const MESSAGES: usize = 25;

/// Images of one recording.
const IMAGES: usize = 120;

/// One recorded run.
struct Run {
    sink: Sink,
    disk: Disk,
    recording: Recording,
    /// The acknowledged messages, and the step at which each answer was sent.
    acked: BTreeMap<String, usize>,
}

impl Run {
    /// `None` if tracing is not possible here.
    fn record(settings: &str) -> Option<Self> {
        // Some attempts fail and are retried, so that outcomes of all kinds are recorded.
        let sink =
            Sink::new(|_, before| if before % 4 == 1 { "500 No" } else { "200 OK" }.to_owned());
        let house = House::new(CONFIG);
        let server = house.start();
        let endpoint = json!({"url": sink.url(), "retry": vec!["0s"; 20]});
        assert_eq!(server.admin_post("/api/v1/endpoints", &endpoint).status, 201);
        server.stop();
        let disk = Disk::at(house.path());
        let directory = scratch();
        let log = directory.path().join("strace");
        let mut tracer = vec!["strace".to_owned()];
        tracer.extend(Recording::arguments(&log, None));
        let server = match house.start_under(&tracer, &[("HAPAX_TEST_SETTINGS", settings)]) {
            Ok(server) => server,
            Err(why) => {
                cannot_run("power loss while sending", &format!("tracing the server: {why}"));
                return None;
            }
        };
        std::thread::scope(|scope| {
            for client in 0..3 {
                let server = &server;
                scope.spawn(move || {
                    for n in 0..MESSAGES {
                        let id = format!("m-{client}-{n}-");
                        let pad = "x".repeat((n * 397 + client * 911) % 3_000);
                        let body = json!({"type": "a", "id": id, "data": {"id": id, "pad": pad}});
                        let answer = server.admin_post("/api/v1/messages", &body);
                        assert_eq!(answer.status, 202, "{answer:?}");
                    }
                });
            }
        });
        sink.wait_for(3 * MESSAGES);
        server.stop();
        let recording = Recording::read(&log, house.path());
        let mut acked = BTreeMap::new();
        for (at, step) in recording.steps().iter().enumerate() {
            let DiskStep::Send(bytes) = step else { continue };
            let text = String::from_utf8_lossy(bytes);
            let (Some(from), true) = (text.find("{\"id\":\"m-"), text.contains("\"deliveries\":"))
            else {
                continue;
            };
            let id = text[from + 7..].split('"').next().unwrap().to_owned();
            acked.insert(id, at);
        }
        assert_eq!(acked.len(), 3 * MESSAGES, "not every answer was found");
        Some(Self { sink, disk, recording, acked })
    }

    /// The acknowledged messages that the image lacks, or that it holds in part.
    fn check(&self, image: &Path, cut: usize) -> Result<(), String> {
        let data = image.join("data");
        let store = SqliteStore::open(SqliteOptions::new(&data)).map_err(|e| e.to_string())?;
        let database = store.path().to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(store.close());
        let rows = query(
            &database,
            "SELECT CAST(b.body AS TEXT) FROM hapax_message m
             JOIN hapax_message_body b ON b.seq = m.seq
             JOIN hapax_delivery d ON d.message_seq = m.seq",
        )?;
        for (id, _) in self.acked.iter().filter(|(_, at)| **at < cut) {
            let found =
                rows.iter().filter(|row| row.contains(&format!("{{\"id\":\"{id}\""))).count();
            if found != 1 {
                return Err(format!("{id} was acknowledged and is there {found} times"));
            }
        }
        let parts = query(
            &database,
            "SELECT m.id FROM hapax_message m LEFT JOIN hapax_message_body b ON b.seq = m.seq
             LEFT JOIN hapax_delivery d ON d.message_seq = m.seq
             WHERE b.seq IS NULL OR d.message_seq IS NULL",
        )?;
        if !parts.is_empty() {
            return Err(format!("messages in part: {parts:?}"));
        }
        let sound = query(&database, "SELECT integrity_check FROM pragma_integrity_check")?;
        if sound == ["ok"] { Ok(()) } else { Err(format!("not sound: {sound:?}")) }
    }

    fn judge(&self, images: usize) -> Vec<String> {
        let steps = self.recording.steps();
        let ends: Vec<usize> = self.acked.values().copied().collect();
        let wrong = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for part in 0..2 {
                let (wrong, ends) = (&wrong, &ends);
                scope.spawn(move || {
                    let mut draw = SeededRng::new(11 + part);
                    let mut cuts: Vec<usize> = (0..images / 2)
                        .map(|n| match n % 2 {
                            0 => ends[draw.below(ends.len())] + 1,
                            _ => draw.below(steps.len()) + 1,
                        })
                        .collect();
                    cuts.sort_unstable();
                    let mut disk = self.disk.clone();
                    for cut in cuts {
                        disk.advance(steps, cut);
                        let image = scratch();
                        disk.image(&mut draw, image.path());
                        // A store that finds a contradiction in its file stops with a panic.
                        let checked =
                            catch_unwind(AssertUnwindSafe(|| self.check(image.path(), cut)));
                        let checked =
                            checked.unwrap_or_else(|_| Err("the store panicked".to_owned()));
                        if let Err(why) = checked {
                            wrong.lock().unwrap().push(format!("after step {cut}: {why}"));
                        }
                    }
                });
            }
        });
        wrong.into_inner().unwrap()
    }
}

#[test]
fn a_power_loss_while_sending_loses_no_acknowledged_message() {
    let Some(run) = Run::record(SMALL) else { return };
    nothing_is_wrong(&run.judge(IMAGES), IMAGES);

    // Starts the server itself on an image. Every delivery arrives, and a repeated one has the same
    // bytes as before.
    let mut draw = SeededRng::new(5);
    let cut = run.acked.values().copied().max().unwrap() + 1;
    let mut disk = run.disk.clone();
    disk.advance(run.recording.steps(), cut);
    let image = scratch();
    disk.image(&mut draw, image.path());
    let house = House::new(CONFIG).data_dir_at(&image.path().join("data"));
    let server = house.start();
    crate::support::until("everything is delivered", || {
        let open = ["waiting", "sending", "failed"].map(|status| {
            let path = format!("/api/v1/deliveries?status={status}");
            server.admin_get(&path).json()["items"].as_array().unwrap().len()
        });
        (open == [0, 0, 0]).then_some(())
    });
    let mut bodies = BTreeMap::new();
    for got in run.sink.got() {
        let first = bodies.entry(got.id()).or_insert_with(|| got.body.clone());
        assert_eq!(*first, got.body, "{}", got.id());
    }
    assert!(run.acked.keys().all(|id| bodies.contains_key(id)));
}

#[test]
fn without_syncs_the_test_detects_lost_messages() {
    // The control: if this passed without syncs, the test above could not fail.
    let Some(run) = Run::record(&format!("{SMALL},sqlite.unsynced=true")) else { return };
    let wrong = run.judge(40);
    assert!(wrong.len() > 10, "only {} of 40 images are wrong: {wrong:?}", wrong.len());
}
