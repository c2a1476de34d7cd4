//! Hapax dies in front of an app, at each named moment of a request with a key: within the lease
//! nothing runs a second time, and every retry gets the stored answer.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use crate::support::charges::{Charge, api, is_replay, kept, proxy};
use crate::support::process::hits;
use crate::support::upstream::Upstream;
use crate::support::{Answer, House, until};

const SIGABRT: i32 = 6;

/// The lease: long enough for a restart on a busy machine, so that some retries arrive before its
/// end.
const LEASE: Duration = Duration::from_secs(6);

/// The pause between two attempts of a client that was asked to retry.
const BACK_OFF: Duration = Duration::from_millis(20);

/// The number of effects, and the client's last answer.
struct Survived {
    app: Upstream,
    last: Answer,
    /// The number of retries that were refused because the key was in progress.
    refused: usize,
    /// The time from before the first attempt to the last answer.
    took: Duration,
}

/// A client charges, the server dies at `point`, and the client retries at the next server until
/// the answer is not a 409.
fn dies_at(point: &str) -> Survived {
    let app = Upstream::counting();
    let lease = LEASE.as_secs();
    let house = House::new(&proxy(&app.url(), &format!("lease = \"{lease}s\"")));
    let hit_file = house.path().join("hits");
    let plan = format!("{point}=abort@1");
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    let mut server = house.start_with(&[("HAPAX_FAILPOINTS", &plan), hits_to]);
    let charge = Charge::with_key("key-1");
    let began = Instant::now();
    assert!(charge.try_send(api(&server)).is_none(), "{point}: answered though it died");
    assert_eq!(server.wait().signal(), Some(SIGABRT), "{point}");
    assert_eq!(hits(&hit_file, point), 1, "{point}");
    let before = app.effects().len();
    let server = house.start();
    let at = api(&server);
    let mut refused = 0;
    let last = until("the key is let go", || {
        let answer = charge.send(at);
        if answer.status == 409 {
            // While the key is in progress, nothing has run a second time.
            assert!(began.elapsed() >= LEASE || app.effects().len() == before, "{point}");
            refused += 1;
            std::thread::park_timeout(BACK_OFF);
            return None;
        }
        Some(answer)
    });
    let took = began.elapsed();
    replays(&charge, at, &last);
    server.stop();
    Survived { app, last, refused, took }
}

/// Checks that every further retry gets the same answer.
fn replays(charge: &Charge<'_>, at: SocketAddr, last: &Answer) {
    for _ in 0..3 {
        let replay = charge.send(at);
        assert!(is_replay(&replay) && kept(&replay) == kept(last), "{replay:?}");
    }
}

#[test]
fn a_crash_before_the_app_was_asked_delays_the_charge_by_a_lease() {
    let survived = dies_at("idem.after_reserve");
    let effects = survived.app.effects();
    assert_eq!(effects.len(), 1, "{effects:?}");
    assert_eq!(effects[0].number("hapax-attempt"), 2);
    assert!(survived.took >= LEASE && !is_replay(&survived.last), "{:?}", survived.took);
    assert!(survived.refused > 0, "no retry came within the lease: nothing was shown");
}

#[test]
fn a_crash_after_the_app_did_its_work_repeats_nothing_within_the_lease() {
    // The answer was lost with the process. A retry after the lease gets the attempt and the fence,
    // which say that the work may have been done before.
    let survived = dies_at("idem.after_work");
    let effects = survived.app.effects();
    assert_eq!(effects.len(), 2, "{effects:?}");
    assert!(survived.took >= LEASE, "{:?}", survived.took);
    assert!(survived.refused > 0, "no retry came within the lease: nothing was shown");
    let (one, two) = (&effects[0], &effects[1]);
    assert_eq!((one.number("hapax-attempt"), two.number("hapax-attempt")), (1, 2));
    assert!(one.number("hapax-fence") < two.number("hapax-fence"));
    assert_eq!(one.header("idempotency-key"), two.header("idempotency-key"));
}

#[test]
fn a_crash_after_the_answer_was_kept_replays_it_at_once() {
    let survived = dies_at("idem.after_finish");
    assert_eq!(survived.app.effects().len(), 1);
    assert!(is_replay(&survived.last) && survived.last.body == b"charge 1", "{:?}", survived.last);
    assert_eq!(survived.refused, 0);
}

#[test]
fn a_sigkill_while_many_charge_doubles_nothing_within_the_lease() {
    // Thirty clients, each with its own key, retry until they get a 201, while the server is killed
    // twice. The lease outlasts the test, so nothing may run twice; requests that ran at a SIGKILL
    // stay in progress.
    const CLIENTS: usize = 30;
    const EACH: usize = 8;
    let app = Upstream::counting();
    let house = House::new(&proxy(&app.url(), "lease = \"10m\""));
    let keys: Vec<String> = (0..CLIENTS * EACH).map(|n| format!("key-{n}")).collect();
    for round in 1..=2 {
        let server = house.start();
        let at = api(&server);
        std::thread::scope(|scope| {
            for share in keys.chunks(EACH) {
                scope.spawn(move || {
                    for key in share {
                        if Charge::with_key(key).try_send(at).is_none() {
                            return;
                        }
                    }
                });
            }
            app.wait_for(round * CLIENTS * EACH / 3);
            server.kill();
        });
    }
    let server = house.start();
    let at = api(&server);
    let mut unknown = 0;
    for key in &keys {
        match Charge::with_key(key).send(at).status {
            201 => {}
            409 => unknown += 1,
            other => panic!("{key}: {other}"),
        }
    }
    let mut done: Vec<_> =
        app.effects().iter().map(|it| it.header("idempotency-key").unwrap().to_owned()).collect();
    let effects = done.len();
    done.sort();
    done.dedup();
    assert_eq!(done.len(), effects, "something was charged twice");
    // Each client has at most one request in flight at a SIGKILL.
    assert!(unknown <= 2 * CLIENTS, "{unknown} keys in progress");
    assert!(effects >= keys.len() - 2 * CLIENTS, "{effects} of {}", keys.len());
    server.stop();
}
