//! Finds out whether one sender sends its next request as soon as it has an answer. Then the writer looks for that
//! request for a moment before it sleeps, because waking a sleeping core takes longer than reading a request.

use std::time::Duration;

/// How long the writer looks for the next request: as long as an answer and a request need to and from a sender
/// nearby. A sender that is slower costs this time once.
pub(super) const NEXT_REQUEST_WITHIN: Duration = Duration::from_micros(100);

/// How long a quick request may take while the writer sleeps.
const QUICK_AFTER_SLEEP: Duration = Duration::from_micros(200);

/// How many requests in a row must have come alone and quickly. With many senders that happens now and then by chance,
/// and looking for the next request would take a core from them: while other threads want the core, the look can last
/// for milliseconds instead of [`NEXT_REQUEST_WITHIN`].
const IN_A_ROW: u32 = 32;

/// What the writer knows about its last requests.
#[derive(Debug, Default)]
pub(super) struct LoneSender {
    /// How many batches in a row were one request that came quickly after the batch before.
    in_a_row: u32,
    /// Whether the command that begins the next batch came quickly.
    is_quick: bool,
}

impl LoneSender {
    /// Whether the next request may follow at once.
    pub(super) fn expects_next(&self) -> bool {
        self.in_a_row >= IN_A_ROW
    }

    /// Records the number of requests of a batch.
    pub(super) fn note_batch(&mut self, requests: usize) {
        let is_alone = requests == 1 && self.is_quick;
        self.in_a_row = if is_alone { self.in_a_row.saturating_add(1) } else { 0 };
    }

    /// Records how long the writer waited for its next command; `None` if no command came.
    pub(super) fn note_wait(&mut self, waited: Option<Duration>) {
        // If the writer slept, waking up is part of the time.
        let bound = if self.expects_next() { NEXT_REQUEST_WITHIN } else { QUICK_AFTER_SLEEP };
        self.is_quick = waited.is_some_and(|waited| waited < bound);
        if !self.is_quick {
            self.in_a_row = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_request_is_expected_only_of_a_lone_sender_that_was_quick() {
        // Looking at any other time would use a core while nothing arrives, or take a core from a busy server.
        let after_requests = |last: fn(&mut LoneSender)| {
            let mut sender = LoneSender::default();
            for _ in 0..IN_A_ROW {
                assert!(!sender.expects_next());
                sender.note_wait(Some(NEXT_REQUEST_WITHIN));
                sender.note_batch(1);
            }
            assert!(sender.expects_next());
            last(&mut sender);
            sender.expects_next()
        };
        assert!(after_requests(|sender| {
            sender.note_wait(Some(NEXT_REQUEST_WITHIN / 2));
            sender.note_batch(1);
        }));
        let ends: [fn(&mut LoneSender); 4] = [
            |sender| sender.note_wait(Some(NEXT_REQUEST_WITHIN)),
            |sender| sender.note_wait(None),
            |sender| sender.note_batch(2),
            |sender| sender.note_batch(0),
        ];
        assert!(ends.into_iter().all(|end| !after_requests(end)));
    }
}
