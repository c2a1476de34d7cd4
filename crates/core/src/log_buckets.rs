//! Logarithmic buckets for durations: four for each doubling, starting at 16 µs. The end of a bucket is at
//! most a quarter above its start, so a quantile that is read from buckets is wrong by at most an eighth.

use std::time::Duration;

/// The number of buckets. The last one ends after every duration that a process can measure.
pub const BUCKETS: usize = 201;

/// The power of two, in nanoseconds, at which buckets begin. All shorter durations share the first bucket.
const FIRST_OCTAVE: u32 = 14;

/// The bucket of a duration.
pub fn bucket_of(took: Duration) -> u8 {
    let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    if nanos < 1 << FIRST_OCTAVE {
        return 0;
    }
    let octave = u64::BITS - 1 - nanos.leading_zeros();
    let quarter = (nanos >> (octave - 2)) & 3;
    (4 * (octave - FIRST_OCTAVE) + 1) as u8 + quarter as u8
}

/// A duration in the middle of a bucket.
pub fn middle_of(bucket: u8) -> Duration {
    let Some(above) = u32::from(bucket).checked_sub(1) else {
        return Duration::from_nanos(1 << (FIRST_OCTAVE - 1));
    };
    let octave = (above / 4 + FIRST_OCTAVE).min(u64::BITS - 1);
    let eighths = u64::from(2 * (above % 4) + 9);
    Duration::from_nanos(eighths << (octave - 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_a_quarter_of_an_octave_and_holds_its_middle() {
        let mut last = 0;
        for nanos in (0..64_u32).flat_map(|octave| [1_u64 << octave, (1_u64 << octave) + 1]) {
            let bucket = bucket_of(Duration::from_nanos(nanos));
            assert!(bucket >= last && usize::from(bucket) < BUCKETS, "{nanos}");
            last = bucket;
        }
        assert_eq!(usize::from(bucket_of(Duration::MAX)), BUCKETS - 1);
        assert_eq!(bucket_of(Duration::ZERO), 0);
        for bucket in 0..BUCKETS as u8 {
            assert_eq!(bucket_of(middle_of(bucket)), bucket);
        }
        for seconds in [0.000_3, 0.002, 0.7, 1.0, 59.0, 86_400.0_f64] {
            let middle = middle_of(bucket_of(Duration::from_secs_f64(seconds))).as_secs_f64();
            assert!((middle / seconds - 1.0).abs() <= 0.125, "{seconds} {middle}");
        }
    }
}
