//! Owns the choice of a port that an engine can keep over a restart. It is only ever a suggestion:
//! whoever starts an engine on it must retry on a clash.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::Mutex;

/// Below what the kernel hands out for port 0 and for outgoing connections: while an engine is down
/// between two starts, a client's own connection must not take its place.
const PORTS: Range<u16> = 15_000..32_000;

/// How many starts may clash before something else must be wrong.
pub(crate) const CLASHES_MAX: u32 = 10;

/// Those that this process has been given: the engine on one may be down between two starts.
static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port on loopback that was free a moment ago, that nobody else in this process was given, and that
/// no connection of anybody's will be: for a server that is to come back to the same address.
pub fn free() -> u16 {
    // Many test processes choose at once, so each must throw its own dice.
    let dice = RandomState::new();
    (0_u32..)
        .map(|throw| {
            let span = u64::from(PORTS.end - PORTS.start);
            let offset = u16::try_from(dice.hash_one(throw) % span);
            PORTS.start + offset.expect("a remainder of a u16 span fits in u16")
        })
        .filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .find(|port| GIVEN.lock().is_ok_and(|mut given| given.insert(*port)))
        .expect("the throws do not end")
}
