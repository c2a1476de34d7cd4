//! Chooses a port that an engine can keep over a restart. Another process may take the port first, so a start
//! must retry on a clash.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::Mutex;

/// The ports that engines use. These ports are below those that the kernel assigns to port 0 and to outgoing
/// connections: while an engine is down between two starts, a client's connection must not take its port.
const PORTS: Range<u16> = 15_000..32_000;

/// How many starts may clash before the launch fails.
pub(crate) const CLASHES_MAX: u32 = 10;

/// The ports that this process has handed out. Each stays reserved, because its engine may be down
/// between two starts.
static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port on loopback for a server that restarts on the same address. The port was free a moment ago, this
/// process has not used it yet, and the kernel assigns it to no outgoing connection.
pub fn free() -> u16 {
    // Many test processes choose at once, so each needs its own random numbers.
    let random = RandomState::new();
    (0_u32..)
        .map(|try_number| {
            let span = u64::from(PORTS.end - PORTS.start);
            let offset = u16::try_from(random.hash_one(try_number) % span);
            PORTS.start + offset.expect("a remainder of a u16 span fits in u16")
        })
        .filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .find(|port| GIVEN.lock().is_ok_and(|mut given| given.insert(*port)))
        .expect("the range of tries does not end")
}
