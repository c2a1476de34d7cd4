//! Parsers of single values: durations, sizes, rates, addresses, networks, names. Each takes text and
//! returns a value or an [`InvalidSetting`].

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use hapax_engine::Rate;

use ipnet::IpNet;

use super::problem::InvalidSetting;

/// How long something is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Kept for at least this long.
    For(Duration),
    /// Never pruned.
    Forever,
}

const SECOND_MS: u64 = 1_000;
const DURATION_UNITS: [(&str, u64); 6] = [
    ("ms", 1),
    ("s", SECOND_MS),
    ("m", 60 * SECOND_MS),
    ("h", 3_600 * SECOND_MS),
    ("d", 86_400 * SECOND_MS),
    ("w", 7 * 86_400 * SECOND_MS),
];

/// `100ms`, `30s`, `5m`, `24h`, `90d`, `2w`, or several in a row as in `1h30m`.
pub(crate) fn duration(text: &str) -> Result<Duration, InvalidSetting> {
    let bad = || {
        InvalidSetting::new(
            format!("\"{text}\" is not a duration"),
            "write a number and one of ms, s, m, h, d, w: \"100ms\", \"5m\", \"90d\"",
        )
    };
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(bad());
    }
    let mut total_ms: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let number: u64 = number.parse().map_err(|_| bad())?;
        let (_, unit_ms) = DURATION_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
        total_ms = number
            .checked_mul(*unit_ms)
            .and_then(|part_ms| total_ms.checked_add(part_ms))
            .ok_or_else(bad)?;
        rest = tail;
    }
    Ok(Duration::from_millis(total_ms))
}

/// A duration that is not zero.
pub(crate) fn span(text: &str) -> Result<Duration, InvalidSetting> {
    match duration(text)? {
        Duration::ZERO => {
            Err(InvalidSetting::new("must be longer than zero", "write a duration such as \"5m\""))
        }
        some => Ok(some),
    }
}

/// A duration, or `forever`.
pub(crate) fn keep(text: &str) -> Result<Keep, InvalidSetting> {
    match text {
        "forever" => Ok(Keep::Forever),
        text => span(text).map(Keep::For).map_err(|InvalidSetting { problem, hint }| {
            InvalidSetting::new(problem, format!("{hint}; or \"forever\""))
        }),
    }
}

const SIZE_UNITS: [(&str, u64); 8] = [
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
];

/// `1MiB`, `512KiB`, `1MB` or a bare number of bytes; at least one byte.
pub(crate) fn size(text: &str) -> Result<usize, InvalidSetting> {
    let bad = || {
        InvalidSetting::new(
            format!("\"{text}\" is not a size"),
            "write a number and one of B, KiB, MiB, GiB, kB, MB: \"1MiB\"",
        )
    };
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, factor) = SIZE_UNITS.iter().find(|(name, _)| *name == unit.trim()).ok_or_else(bad)?;
    let number: u64 = number.parse().map_err(|_| bad())?;
    let bytes = number.checked_mul(*factor).ok_or_else(bad)?;
    match usize::try_from(bytes) {
        Ok(0) => {
            Err(InvalidSetting::new("must be at least one byte", "write a size such as \"1MiB\""))
        }
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(bad()),
    }
}

/// `100/s`, `1000/m`, `10/h`; `off` is no limit.
pub(crate) fn rate(text: &str) -> Result<Option<Rate>, InvalidSetting> {
    if text == "off" {
        return Ok(None);
    }
    let bad = || {
        InvalidSetting::new(
            format!("\"{text}\" is not a rate"),
            "write a number per s, m or h: \"100/s\", \"1000/m\"; or \"off\"",
        )
    };
    let (count, per) = text.split_once('/').ok_or_else(bad)?;
    let count = count.trim().parse().map_err(|_| bad())?;
    let per = match per.trim() {
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3_600),
        _unknown => return Err(bad()),
    };
    Ok(Some(Rate { count, per }))
}

/// `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`.
pub(crate) fn address(text: &str) -> Result<SocketAddr, InvalidSetting> {
    let bad = || {
        InvalidSetting::new(
            format!("\"{text}\" is not an address to listen on"),
            "write IP:PORT, such as \"127.0.0.1:8080\", \"0.0.0.0:8080\" or \"[::1]:8080\"",
        )
    };
    match text.strip_prefix("localhost:") {
        Some(port) => {
            let port = port.parse().map_err(|_| bad())?;
            Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
        }
        None => text.parse().map_err(|_| bad()),
    }
}

/// `10.0.0.0/8`, or a single address.
pub(crate) fn net(text: &str) -> Result<IpNet, InvalidSetting> {
    let single = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse::<IpNet>().ok().or_else(single).ok_or_else(|| {
        InvalidSetting::new(
            format!("\"{text}\" is not a network"),
            "write \"10.0.0.0/8\", \"fd00::/8\" or a single address",
        )
    })
}

/// `https://hooks.example.com`, optionally with a path; a trailing slash is removed.
pub(crate) fn base_url(text: &str, hint: &'static str) -> Result<String, InvalidSetting> {
    let bad = |what: &str| InvalidSetting::new(format!("\"{text}\" {what}"), hint);
    let uri: http::Uri = text.parse().map_err(|_| bad("is not a URL"))?;
    match uri.scheme_str() {
        Some("http" | "https") => {}
        Some(_) | None => return Err(bad("must begin with http:// or https://")),
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(bad("names no host"));
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(InvalidSetting::new("must not contain a user name", hint));
    }
    if uri.query().is_some() || text.contains('#') {
        return Err(bad("must have neither query nor fragment"));
    }
    Ok(text.trim_end_matches('/').to_owned())
}

/// A name that is valid in a URL: letters, digits, `_`, `.`, `-`, at most 64 characters.
pub(crate) fn name(text: &str) -> Result<(), InvalidSetting> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let dots_only = text.bytes().all(|byte| byte == b'.');
    if (1..=64).contains(&text.len()) && text.bytes().all(allowed) && !dots_only {
        return Ok(());
    }
    Err(InvalidSetting::new(
        format!("\"{}\" is not a valid name", text.escape_debug()),
        "the name is part of the URL: use 1 to 64 letters, digits, \"_\", \".\" or \"-\"",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_a_number_and_a_unit_and_nothing_else() {
        let check = |text: &str, expected_ms: Option<u64>| {
            assert_eq!(duration(text).ok(), expected_ms.map(Duration::from_millis), "{text:?}");
        };
        check("100ms", Some(100));
        check("5m", Some(300_000));
        check("1h30m", Some(5_400_000));
        check("90d", Some(7_776_000_000));
        check("0s", Some(0));
        for bad in ["", " ", "5", "m", "5 m", "-5m", "5M", "1.5h", "5m!", "99999999999999999999d"] {
            check(bad, None);
        }
        check("18446744073709551615w", None);
    }

    #[test]
    fn sizes_rates_and_nets_refuse_unknown_units() {
        assert_eq!(size("1MiB"), Ok(1 << 20));
        assert_eq!(size("1048576"), Ok(1 << 20));
        assert_eq!(size("2 kB"), Ok(2_000));
        for bad in ["", "MiB", "1Mib", "-1B", "0", "1.5MiB", "99999999999999GiB"] {
            assert!(size(bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            rate("1000/m").ok().flatten().map(|rate| (rate.count.get(), rate.per.as_secs())),
            Some((1000, 60))
        );
        assert_eq!(rate("off"), Ok(None));
        for bad in ["", "0/s", "-1/s", "5", "5/d", "5/", "/s"] {
            assert!(rate(bad).is_err(), "{bad:?}");
        }
        assert!(net("10.0.0.0/8").is_ok() && net("::1").is_ok() && net("10.0.0.0/33").is_err());
    }

    #[test]
    fn urls_and_names_must_be_usable_as_they_stand() {
        assert_eq!(base_url("https://a.example/", "").as_deref(), Ok("https://a.example"));
        for bad in ["a.example", "ftp://a.example", "https://", "https://a/?q=1", "https://u@a/"] {
            assert!(base_url(bad, "").is_err(), "{bad:?}");
        }
        assert!(name("a.b_c-9").is_ok());
        for bad in ["", ".", "..", "a/b", "a b", "ü", "a%20", &"x".repeat(65)] {
            assert!(name(bad).is_err(), "{bad:?}");
        }
    }
}
