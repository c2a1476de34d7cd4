//! Counts HTTP/2 frames without progress. PRIORITY, PING, SETTINGS, WINDOW_UPDATE, empty DATA and
//! similar frames cost a peer nothing and the server a little. A peer is cut off if it sends far
//! more of these frames than its requests, the answers and the elapsed time justify.
//!
//! The counter reads the plaintext of one connection, in any number of pieces, and buffers nine
//! bytes at most.

use std::time::Instant;

use crate::limits::{
    FREE_FRAMES, FREE_FRAMES_PER_REQUEST, FREE_FRAMES_PER_SECOND, SENT_BYTES_PER_FREE_FRAME,
};

/// Counts the frames of one connection.
#[derive(Debug)]
pub(crate) struct FrameWatch {
    /// Bytes of the preface, or of a frame, that are still to be skipped.
    skip: usize,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// How many more frames without progress are allowed.
    left: u32,
    refilled_at: Instant,
    sent_bytes: usize,
}

const HEADER_BYTES: usize = 9;
const PREFACE_BYTES: usize = 24;

/// Too many frames without progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flooded;

impl FrameWatch {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            skip: PREFACE_BYTES,
            header: [0; HEADER_BYTES],
            header_bytes: 0,
            left: FREE_FRAMES,
            refilled_at: now,
            sent_bytes: 0,
        }
    }

    /// Reads the next bytes of the connection.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flooded> {
        while !bytes.is_empty() {
            let passed = self.skip.min(bytes.len());
            self.skip -= passed;
            bytes = &bytes[passed..];
            let taken = (HEADER_BYTES - self.header_bytes).min(bytes.len());
            self.header[self.header_bytes..][..taken].copy_from_slice(&bytes[..taken]);
            self.header_bytes += taken;
            bytes = &bytes[taken..];
            if self.header_bytes == HEADER_BYTES {
                self.header_bytes = 0;
                self.frame(now)?;
            }
        }
        Ok(())
    }

    /// Records that this many bytes were sent: a peer that reads them may send WINDOW_UPDATE
    /// frames.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes;
        if self.sent_bytes >= SENT_BYTES_PER_FREE_FRAME {
            let frames = self.sent_bytes / SENT_BYTES_PER_FREE_FRAME;
            self.sent_bytes %= SENT_BYTES_PER_FREE_FRAME;
            self.refill(u32::try_from(frames).unwrap_or(u32::MAX));
        }
    }

    fn frame(&mut self, now: Instant) -> Result<(), Flooded> {
        let [a, b, c, kind, flags, ..] = self.header;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        self.skip = length;
        let ends_stream = flags & END_STREAM != 0;
        match kind {
            HEADERS => self.refill(FREE_FRAMES_PER_REQUEST),
            DATA if length > 0 || ends_stream => {}
            _without_progress => {
                if self.left == 0 {
                    let seconds = now.saturating_duration_since(self.refilled_at).as_secs();
                    self.refilled_at = now;
                    let seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
                    self.refill(seconds.saturating_mul(FREE_FRAMES_PER_SECOND));
                }
                self.left = self.left.checked_sub(1).ok_or(Flooded)?;
            }
        }
        Ok(())
    }

    fn refill(&mut self, frames: u32) {
        self.left = self.left.saturating_add(frames).min(FREE_FRAMES);
    }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PRIORITY: u8 = 2;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        frame.resize(HEADER_BYTES + payload, 0);
        frame
    }

    fn opened() -> (FrameWatch, Instant) {
        let now = Instant::now();
        let mut watch = FrameWatch::new(now);
        watch.feed(&[0; PREFACE_BYTES], now).unwrap();
        (watch, now)
    }

    /// The number of such frames that are allowed.
    fn frames_allowed(watch: &mut FrameWatch, frame: &[u8], now: Instant) -> u32 {
        (0..FREE_FRAMES * 2).take_while(|_| watch.feed(frame, now).is_ok()).count() as u32
    }

    #[test]
    fn frames_without_progress_are_bounded_however_they_are_cut() {
        for (kind, payload) in
            [(PRIORITY, 5), (3, 4), (4, 0), (6, 8), (8, 4), (9, 0), (16, 3), (DATA, 0)]
        {
            let (mut watch, now) = opened();
            assert_eq!(frames_allowed(&mut watch, &frame(kind, 0, payload), now), FREE_FRAMES);
            let (mut watch, now) = opened();
            let all = frame(kind, 0, payload).repeat(FREE_FRAMES as usize);
            assert!(all.iter().all(|byte| watch.feed(&[*byte], now).is_ok()));
            assert_eq!(watch.feed(&frame(kind, 0, payload), now), Err(Flooded));
        }
    }

    #[test]
    fn requests_bodies_answers_and_time_allow_more_of_them() {
        let (mut watch, now) = opened();
        let priority = frame(PRIORITY, 0, 0);
        assert_eq!(frames_allowed(&mut watch, &priority, now), FREE_FRAMES);
        watch.feed(&frame(HEADERS, 4, 20), now).unwrap();
        assert_eq!(frames_allowed(&mut watch, &priority, now), FREE_FRAMES_PER_REQUEST);
        watch.sent(SENT_BYTES_PER_FREE_FRAME * 3);
        assert_eq!(frames_allowed(&mut watch, &priority, now), 3);
        let later = now + Duration::from_secs(2);
        assert_eq!(frames_allowed(&mut watch, &priority, later), FREE_FRAMES_PER_SECOND * 2);
        let (mut watch, now) = opened();
        for _ in 0..FREE_FRAMES * 2 {
            watch.feed(&frame(DATA, 0, 100), now).unwrap();
            watch.feed(&frame(DATA, END_STREAM, 0), now).unwrap();
        }
    }
}
