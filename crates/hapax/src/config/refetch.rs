//! `[sources.NAME.handlers.H.refetch]`: the URL of the current object, fetched before each attempt.

use std::time::Duration;

use hapax_core::handler::{Refetch, RefetchError, RefetchUrl};
use hapax_core::secret::Secret;
use http::{HeaderName, HeaderValue};

use super::document::Section;
use super::problem::{InvalidSetting, SettingOrigin};
use super::reader::ConfigReader;
use super::units;

pub(super) const KEYS: [&str; 4] = ["url", "headers", "timeout", "max_body"];
/// Slower APIs are not suitable for a request before every attempt.
const REFETCH_TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);
const REFETCH_BYTES_DEFAULT: usize = 1024 * 1024;
/// Each running attempt holds its object in memory.
const REFETCH_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Headers that the HTTP client sets.
const REFETCH_HEADERS_OURS: [&str; 5] =
    ["host", "content-length", "transfer-encoding", "connection", "expect"];

impl ConfigReader<'_> {
    pub(super) fn refetch(&mut self, handler: &Section<'_>) -> Option<Refetch> {
        let section = handler.get("refetch")?.section(&mut self.problems)?;
        section.expect(&KEYS, &mut self.problems);
        let problems = &mut self.problems;
        let timeout = section.get("timeout").and_then(|entry| entry.parse(units::span, problems));
        let most = section.get("max_body");
        let most = most.and_then(|entry| entry.parse_number(refetch_bytes, problems));
        let headers = self.refetch_headers(&section);
        let url = self.refetch_url(handler, &section);
        Some(Refetch {
            url: url?,
            headers: headers?,
            timeout: timeout.unwrap_or(REFETCH_TIMEOUT_DEFAULT),
            body_bytes_max: most.unwrap_or(REFETCH_BYTES_DEFAULT),
        })
    }

    fn refetch_url(&mut self, handler: &Section<'_>, section: &Section<'_>) -> Option<RefetchUrl> {
        let Some(entry) = section.get("url") else {
            let invalid = InvalidSetting::new(
                "has no url",
                "add url = \"https://api.example.com/payouts/{resource}\"",
            );
            section.report(invalid, &mut self.problems);
            return None;
        };
        let text = entry.text(&mut self.problems)?;
        let url = match RefetchUrl::parse(text) {
            Ok(url) => url,
            Err(RefetchError { at, problem, hint }) => {
                let at = entry.byte_in_file(self.text, at).filter(|_| at > 0);
                let origin = SettingOrigin::File(at.unwrap_or(entry.at()));
                self.problems.add(origin, entry.path(), InvalidSetting::new(problem, hint));
                return None;
            }
        };
        if url.names_resource() && handler.get("order").is_none() {
            let invalid = InvalidSetting::new(
                "{resource} needs a handler with an order",
                "add `order` with resource = \"/data/object/id\" and by = \"/created\"",
            );
            entry.report(invalid, &mut self.problems);
            return None;
        }
        Some(url)
    }

    fn refetch_headers(&mut self, section: &Section<'_>) -> Option<Vec<(HeaderName, Secret)>> {
        let Some(entry) = section.get("headers") else { return Some(Vec::new()) };
        let section = entry.section(&mut self.problems)?;
        let entries: Vec<_> = section.entries().collect();
        let mut headers = Vec::new();
        for entry in &entries {
            let invalid = match HeaderName::try_from(entry.name()) {
                Ok(name) if REFETCH_HEADERS_OURS.contains(&name.as_str()) => {
                    InvalidSetting::new("is set by the HTTP client", "remove it")
                }
                Ok(name) => {
                    let Some(secret) = self.secret(entry) else { continue };
                    if HeaderValue::from_str(secret.expose()).is_ok() {
                        headers.push((name, secret));
                        continue;
                    }
                    InvalidSetting::new(
                        "is not a valid header value",
                        "write one line of ASCII, such as \"Bearer …\"",
                    )
                }
                Err(_) => InvalidSetting::new(
                    "is not the name of a header",
                    "write a name such as authorization",
                ),
            };
            entry.report(invalid, &mut self.problems);
        }
        (headers.len() == entries.len()).then_some(headers)
    }
}

fn refetch_bytes(text: &str) -> Result<usize, InvalidSetting> {
    match units::size(text)? {
        bytes @ 1..=REFETCH_BYTES_MAX => Ok(bytes),
        _other => Err(InvalidSetting::new(
            "is not a size from 1 to 16MiB",
            "each running attempt holds its object in memory: write \"1MiB\"",
        )),
    }
}
