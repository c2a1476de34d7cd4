//! Finds out whether one sender sends its next request as soon as it has an answer. Then the writer looks for that
//! request for a moment before it sleeps, because waking a sleeping core takes longer than reading a request.

use std::time::Duration;

/// How long the writer looks for the next request: as long as an answer and a request need to and from a sender
/// nearby. A sender that is slower costs this time once.
pub(super) const NEXT_REQUEST_WITHIN: Duration = Duration::from_micros(100);

/// How long a quick request may take while the writer sleeps.
const QUICK_AFTER_SLEEP: Duration = Duration::from_micros(200);

/// How many more requests must have come alone and quickly than slowly. With many senders a few do so by chance, and
/// looking for the next request would take a core from them: while other threads want the core, the look can last for
/// milliseconds instead of [`NEXT_REQUEST_WITHIN`].
const ENOUGH: u32 = 32;

/// The highest count, so that a sender that becomes slow is noticed soon.
const MOST: u32 = 2 * ENOUGH;

/// How many quick requests a slow one outweighs. A lone sender is slow now and then, when something else runs.
const SLOW_OUTWEIGHS: u32 = 4;

/// What the writer knows about its last requests.
#[derive(Debug, Default)]
pub(super) struct LoneSender {
    /// Batches of one request that came quickly after the batch before, less the slow ones. A batch of several
    /// requests sets the count to zero.
    alone: u32,
    /// Whether the command that begins the next batch came quickly.
    is_quick: bool,
}

impl LoneSender {
    /// Whether the next request may follow at once.
    pub(super) fn expects_next(&self) -> bool {
        self.alone >= ENOUGH
    }

    /// Records the number of requests of a batch.
    pub(super) fn note_batch(&mut self, requests: usize) {
        self.alone = match requests {
            1 if self.is_quick => (self.alone + 1).min(MOST),
            1 => self.alone,
            _none_or_several => 0,
        };
    }

    /// Records how long the writer waited for its next command; `None` if no command came.
    pub(super) fn note_wait(&mut self, waited: Option<Duration>) {
        // If the writer slept, waking up is part of the time.
        let bound = if self.expects_next() { NEXT_REQUEST_WITHIN } else { QUICK_AFTER_SLEEP };
        self.is_quick = waited.is_some_and(|waited| waited < bound);
        if !self.is_quick {
            self.alone = self.alone.saturating_sub(SLOW_OUTWEIGHS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Option<Duration> = Some(Duration::from_micros(50));
    const SLOW: Option<Duration> = Some(QUICK_AFTER_SLEEP);

    fn request(sender: &mut LoneSender, waited: Option<Duration>, requests: usize) -> bool {
        sender.note_wait(waited);
        sender.note_batch(requests);
        sender.expects_next()
    }

    /// A sender that the writer expects the next request from, and has for long.
    fn known_sender() -> LoneSender {
        let mut sender = LoneSender::default();
        for nth in 1..=2 * MOST {
            assert_eq!(request(&mut sender, QUICK, 1), nth >= ENOUGH);
        }
        sender
    }

    #[test]
    fn the_next_request_is_expected_only_of_a_lone_sender_that_is_quick() {
        // Looking at any other time would use a core while nothing arrives, or take a core from a busy server.
        assert!(request(&mut known_sender(), SLOW, 1), "a lone sender is slow now and then");
        assert!(!request(&mut known_sender(), QUICK, 2), "the batch had several requests");
        for idle in [SLOW, None] {
            let mut sender = known_sender();
            let looks = (0..100).take_while(|_| request(&mut sender, idle, 1)).count();
            assert!(looks < 10, "the writer looked {looks} times for a sender that became slow");
        }
    }

    #[test]
    fn quick_requests_among_slow_ones_are_chance() {
        // Many senders that take turns: every second request comes soon after the one before.
        let mut sender = LoneSender::default();
        for _ in 0..1_000 {
            assert!(!request(&mut sender, QUICK, 1));
            assert!(!request(&mut sender, SLOW, 1));
        }
    }
}
