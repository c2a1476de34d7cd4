//! A disk that fills up and a sync that fails, under the real server. Senders get no 2xx without durability,
//! but a 503 with Retry-After, and reads continue. The retry of a refused event is accepted and never
//! answered as a duplicate.
//!
//! Tests that need mounting or tracing are skipped on machines that do not allow it, but never in CI.
//! [`power_loss`] tests a power loss.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::sender::event;
use crate::support::{Answer, House, Lines, Sender, Server, cannot_run, until};

const SECRET: &str = "whsec_faults";

fn house() -> House {
    House::new(&format!("[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n"))
}

/// A start moves the log into the file, so freeing the ballast must leave room for both.
const DISK: &str = "18m";

/// A small separate disk, unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: &Path, size: &str) -> Result<Self, String> {
        std::fs::create_dir_all(at).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "hapax-test"])
            .arg(at)
            .output()
            .map_err(|error| error.to_string())?;
        if mounted.status.success() {
            Ok(Self(at.to_owned()))
        } else {
            Err(String::from_utf8_lossy(&mounted.stderr).trim().to_owned())
        }
    }

    fn ballast(&self) -> PathBuf {
        self.0.join("ballast")
    }

    /// Fills the rest of the disk, to the last block.
    fn fill(&self) {
        let mut ballast = File::options().append(true).create(true).open(self.ballast()).unwrap();
        while ballast.write(&[0; 4096]).is_ok_and(|written| written > 0) {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Makes system calls of a running server fail, until dropped.
pub(super) struct Failing(Child);

/// Every sync, from now on.
pub(super) const EVERY_SYNC: &str = "fsync,fdatasync:error=EIO";

impl Failing {
    pub(super) fn of(server: &Server, fault: &str) -> Result<Self, String> {
        let calls = fault.split(':').next().unwrap();
        let mut strace = Command::new("strace")
            .args(["-f", "-e", &format!("trace={calls}"), "-e", &format!("inject={fault}")])
            .args(["-o", "/dev/null", "-p", &server.pid().to_string()])
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let said = Lines::of(strace.stderr.take().unwrap());
        match said.try_wait_for("attached") {
            Some(_) => Ok(Self(strace)),
            None => {
                let _ = strace.wait();
                Err(said.text().trim().to_owned())
            }
        }
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        // A strace that is interrupted detaches from the server cleanly.
        let script = format!("kill -INT {}", self.0.id());
        let _ = Command::new("sh").args(["-c", &script]).status();
        let _ = self.0.wait();
    }
}

#[track_caller]
pub(super) fn is_refused_for_now(answer: &Answer) {
    assert_eq!(answer.status, 503, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    let wait: u64 = answer.header("retry-after").and_then(|wait| wait.parse().ok()).unwrap();
    assert!((1..=60).contains(&wait), "{answer:?}");
}

fn large(sender: &Sender, id: &str) -> Vec<u8> {
    let body = event(id).replace("{}", &format!("{{\"pad\":\"{}\"}}", "x".repeat(60_000)));
    sender.request(body).bytes()
}

#[test]
fn a_full_disk_is_503_until_there_is_room_and_no_refused_event_becomes_a_duplicate() {
    let house = house();
    let disk = match Disk::mount(&house.path().join("disk"), DISK) {
        Ok(disk) => disk,
        Err(why) => return cannot_run("a full disk", &format!("mounting a small disk: {why}")),
    };
    let house = house.data_dir_at(&disk.0.join("data"));
    std::fs::write(disk.ballast(), vec![0; 12 << 20]).unwrap();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let (mut acked, mut refused) = (Vec::new(), Vec::new());

    // Sends until no commit succeeds. After the first refusal the test fills the rest of the disk.
    for n in 0..2_000 {
        let event_id = format!("evt_{n}");
        let answer = server.ask(large(&sender, &event_id));
        if answer.status == 200 {
            answer.is("accepted");
            acked.push((event_id, answer.id()));
            continue;
        }
        is_refused_for_now(&answer);
        refused.push(event_id);
        disk.fill();
        if refused.len() >= 20 && server.admin_get("/readyz").status == 503 {
            break;
        }
    }
    assert!(!acked.is_empty() && refused.len() >= 20, "{} {}", acked.len(), refused.len());
    let ready = server.admin_get("/readyz");
    assert_eq!(ready.status, 503, "{ready:?}");
    assert_eq!(server.admin_get("/healthz").status, 200);
    // Reads continue, and show the acked events and nothing else.
    assert_eq!(server.events("").len(), acked.len());
    // Even a copy of a known event gets no 200 while writes fail.
    is_refused_for_now(&server.ask(large(&sender, &refused[0])));
    let rejections = server.metric("hapax_rejections_total", &["source=\"stripe\""]);
    assert!(rejections >= refused.len() as f64, "{rejections}");

    std::fs::remove_file(disk.ballast()).unwrap();
    until("it accepts again by itself", || {
        (server.admin_get("/readyz").status == 200).then_some(())
    });
    for event_id in &refused {
        let answer = server.ask(large(&sender, event_id));
        answer.is("accepted");
        acked.push((event_id.clone(), answer.id()));
    }
    server.kill();

    let server = house.start();
    for (event_id, id) in &acked {
        let answer = server.ask(large(&sender, event_id));
        answer.is("duplicate");
        assert_eq!(answer.id(), *id, "{event_id}");
    }
    assert_eq!(server.events("").len(), acked.len());
    server.stop();
}

#[test]
fn a_server_killed_on_a_full_disk_starts_again_when_there_is_room() {
    let house = house();
    let disk = match Disk::mount(&house.path().join("disk"), DISK) {
        Ok(disk) => disk,
        Err(why) => return cannot_run("a full disk and a kill", &format!("mounting: {why}")),
    };
    let house = house.data_dir_at(&disk.0.join("data"));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let first = server.ask(sender.event("evt_first"));
    first.is("accepted");
    disk.fill();
    let mut refused = Vec::new();
    let mut acked = vec![("evt_first".to_owned(), first.id())];
    for n in 0..200 {
        let event_id = format!("evt_{n}");
        let answer = server.ask(large(&sender, &event_id));
        match answer.status {
            200 => acked.push((event_id, answer.id())),
            _ => {
                is_refused_for_now(&answer);
                refused.push(event_id);
            }
        }
        if refused.len() == 5 {
            break;
        }
    }
    assert_eq!(refused.len(), 5);
    server.kill();
    std::fs::remove_file(disk.ballast()).unwrap();
    let server = house.start();
    assert_eq!(server.events("").len(), acked.len());
    for event_id in &refused {
        server.ask(large(&sender, event_id)).is("accepted");
    }
    for (event_id, id) in &acked {
        let detail = server.admin_get(&format!("/api/v1/events/{event_id}")).json();
        assert_eq!(detail["id"], id.as_str(), "{event_id}");
    }
}

#[test]
fn a_first_start_on_a_full_disk_fails_and_leaves_nothing_in_the_way_of_the_next() {
    let house = House::without_config();
    let disk = match Disk::mount(&house.path().join("disk"), DISK) {
        Ok(disk) => disk,
        Err(why) => return cannot_run("a start on a full disk", &format!("mounting: {why}")),
    };
    let house = house.data_dir_at(&disk.0.join("data"));
    disk.fill();
    let (code, said) = house.fail();
    assert!(matches!(code, Some(2 | 3)), "{code:?}: {said}");
    assert!(said.contains("No space left") || said.contains("full"), "{said}");
    std::fs::remove_file(disk.ballast()).unwrap();
    let server = house.start();
    assert_eq!(server.admin_get("/readyz").status, 200);
    server.stop();
}

#[test]
fn a_failing_sync_is_503_for_every_request_until_it_works_again() {
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let durable = server.ask(sender.event("evt_durable"));
    durable.is("accepted");

    let failing = match Failing::of(&server, EVERY_SYNC) {
        Ok(failing) => failing,
        Err(why) => return cannot_run("a failing sync", &format!("tracing the server: {why}")),
    };
    let refused: Vec<String> = (0..40).map(|n| format!("evt_refused_{n}")).collect();
    std::thread::scope(|scope| {
        for part in refused.chunks(10) {
            let (server, sender) = (&server, &sender);
            scope.spawn(move || {
                for event_id in part {
                    is_refused_for_now(&server.ask(sender.event(event_id)));
                    // The copy of a refused event must be refused too.
                    is_refused_for_now(&server.ask(sender.event(event_id)));
                }
            });
        }
    });
    assert_eq!(server.admin_get("/readyz").status, 503);
    // An event that never became durable is not shown.
    let shown = server.events("");
    assert_eq!(shown.len(), 1, "{shown:?}");
    is_refused_for_now(&server.ask(sender.event("evt_durable")));

    drop(failing);
    until("it accepts again by itself", || {
        (server.admin_get("/readyz").status == 200).then_some(())
    });
    let mut acked = vec![("evt_durable".to_owned(), durable.id())];
    for event_id in &refused {
        let answer = server.ask(sender.event(event_id));
        answer.is("accepted");
        acked.push((event_id.clone(), answer.id()));
    }
    server.ask(sender.event("evt_new")).is("accepted");
    server.kill();

    let server = house.start();
    for (event_id, id) in &acked {
        let answer = server.ask(sender.event(event_id));
        answer.is("duplicate");
        assert_eq!(answer.id(), *id, "{event_id}");
    }
    assert_eq!(server.events("").len(), acked.len() + 1);
}

#[test]
fn a_server_killed_while_its_sync_fails_has_every_event_once_afterwards() {
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    server.ask(sender.event("evt_durable")).is("accepted");
    let failing = match Failing::of(&server, EVERY_SYNC) {
        Ok(failing) => failing,
        Err(why) => return cannot_run("a failing sync and a kill", &format!("tracing: {why}")),
    };
    let refused: Vec<String> = (0..5).map(|n| format!("evt_refused_{n}")).collect();
    for event_id in &refused {
        is_refused_for_now(&server.ask(sender.event(event_id)));
    }
    server.kill();
    drop(failing);
    let server = house.start();
    // The log may contain a refused event; after a start it is durable or gone, never both.
    for event_id in &refused {
        let answer = server.ask(sender.event(event_id));
        assert_eq!(answer.status, 200, "{answer:?}");
        server.ask(sender.event(event_id)).is("duplicate");
    }
    assert_eq!(server.events("").len(), refused.len() + 1);
}

#[test]
fn a_shutdown_ends_although_no_write_succeeds() {
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    server.ask(sender.event("evt_durable")).is("accepted");
    let failing = match Failing::of(&server, EVERY_SYNC) {
        Ok(failing) => failing,
        Err(why) => return cannot_run("a failing sync and a stop", &format!("tracing: {why}")),
    };
    is_refused_for_now(&server.ask(sender.event("evt_refused")));
    let said = server.stop();
    drop(failing);
    assert!(said.contains("stopped"), "{said}");
    let server = house.start();
    server.ask(sender.event("evt_durable")).is("duplicate");
}

#[test]
fn a_disk_that_fails_now_and_then_never_makes_a_refused_event_a_duplicate() {
    // Commits, recoveries and copies all meet the fault at some time, in every phase. A recovery
    // and the commit after it make seven syncs in a row. While the log still contains the schema, a
    // recovery writes each of its pages twice: the fault must let that many writes through.
    for fault in [
        "fsync,fdatasync:error=EIO:when=2+8",
        "pwrite64:error=ENOSPC:when=4+401",
        "pwrite64:error=EIO:when=3+397",
    ] {
        let house = house();
        let server = house.start();
        let sender = Sender::stripe(SECRET);
        server.ask(sender.event("evt_durable")).is("accepted");
        let failing = match Failing::of(&server, fault) {
            Ok(failing) => failing,
            Err(why) => return cannot_run("a disk that fails now and then", &why),
        };
        let refusals = AtomicUsize::new(0);
        let acked: Vec<(String, String)> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|client| {
                    let (server, sender, refusals) = (&server, &sender, &refusals);
                    scope.spawn(move || {
                        let keep = |n: usize| {
                            let event_id = format!("evt_{client}_{n}");
                            let answer = until(fault, || {
                                let answer = server.ask(sender.event(&event_id));
                                if answer.status == 200 {
                                    return Some(answer);
                                }
                                is_refused_for_now(&answer);
                                refusals.fetch_add(1, Ordering::Relaxed);
                                None
                            });
                            answer.is("accepted");
                            (event_id, answer.id())
                        };
                        // A commit in the background may meet the first fault instead of an event.
                        let mut kept = Vec::new();
                        let has_failed = || refusals.load(Ordering::Relaxed) > 0;
                        while kept.len() < 8 || (!has_failed() && kept.len() < 200) {
                            kept.push(keep(kept.len()));
                        }
                        kept
                    })
                })
                .collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        assert!(refusals.into_inner() > 0, "{fault}: nothing failed");
        server.kill();
        drop(failing);

        let server = house.start();
        assert_eq!(server.events("").len(), acked.len() + 1, "{fault}");
        for (event_id, id) in &acked {
            let answer = server.ask(sender.event(event_id));
            answer.is("duplicate");
            assert_eq!(answer.id(), *id, "{fault}: {event_id}");
        }
    }
}

#[test]
fn a_disk_with_room_for_recovery_but_for_no_event_is_not_tried_without_a_pause() {
    // Every ninth write fails: always a write of an event, never one of the few writes of a
    // recovery.
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    server.ask(sender.event("evt_durable")).is("accepted");
    let failing = match Failing::of(&server, "pwrite64:error=ENOSPC:when=4+9") {
        Ok(failing) => failing,
        Err(why) => return cannot_run("a disk with hardly any room", &why),
    };
    let began = std::time::Instant::now();
    let mut wire = server.wire();
    for n in 0..1_000 {
        let request = large(&sender, &format!("evt_{n}"));
        assert!(wire.try_ask(&request).is_some_and(|answer| matches!(answer.status, 200 | 503)));
    }
    let pauses = began.elapsed().as_millis() / 200;
    drop(failing);
    let failures = server.stderr.text().matches("a commit failed").count() as u128;
    assert!((1..=pauses + 3).contains(&failures), "{failures} failures in {pauses} pauses");
}
