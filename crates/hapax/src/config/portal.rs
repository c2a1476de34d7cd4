//! `[portal]`: the listener of the receiving parties' pages.

use std::net::SocketAddr;
use std::sync::Arc;

use hapax_engine::tls::Certificate;

use super::document::Section;
use super::problem::InvalidSetting;
use super::proxies::overlap;
use super::reader::ConfigReader;
use super::settings::Settings;
use super::units;

/// `[portal]`. Without the section there is no portal.
#[derive(Debug, Clone)]
pub(crate) struct PortalSettings {
    /// The address of the pages.
    pub(crate) listen: SocketAddr,
    /// The URL of the pages as browsers see it, without a trailing slash; by default the address of the listener.
    pub(crate) public_url: Option<String>,
    /// TLS on the listener.
    pub(crate) tls: Option<Arc<Certificate>>,
}

/// Every key of `[portal]`.
pub(super) const KEYS: [&str; 3] = ["listen", "public_url", "tls"];

const LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8082);

impl ConfigReader<'_> {
    /// Reads `[portal]`, if there is one.
    pub(super) fn portal(
        &mut self,
        root: &Section<'_>,
        settings: &Settings,
        proxies: &[super::Proxy],
    ) -> Option<PortalSettings> {
        let section = root.get("portal")?.section(&mut self.problems)?;
        section.expect(&KEYS, &mut self.problems);
        let entry = section.get("listen");
        let listen = match &entry {
            Some(entry) => entry.parse(units::address, &mut self.problems)?,
            None => LISTEN_DEFAULT,
        };
        let own = [("listen", settings.listen), ("admin_listen", settings.admin_listen)];
        let own = own.into_iter().map(|(key, at)| (key.to_owned(), at));
        let proxies = proxies.iter().map(|it| (format!("proxies.{}.listen", it.name), it.listen));
        if let Some((key, _)) = own.chain(proxies).find(|(_, other)| overlap(*other, listen)) {
            let invalid = InvalidSetting::new(
                format!("{listen} is used by `{key}` already"),
                "give each listener its own port; port 0 picks a free one",
            );
            match &entry {
                Some(entry) => entry.report(invalid, &mut self.problems),
                None => section.report(invalid, &mut self.problems),
            }
        }
        let hint = "write the URL that receiving parties use: \"https://webhooks.example.com\"";
        let public_url = match section.get("public_url") {
            Some(entry) => entry.parse(|text| units::base_url(text, hint), &mut self.problems),
            None if listen.ip().is_loopback() => None,
            None => {
                let invalid =
                    InvalidSetting::new("has no public_url, which links begin with", hint);
                section.report(invalid, &mut self.problems);
                None
            }
        };
        let tls = self.tls(&section, "tls");
        Some(PortalSettings { listen, public_url, tls })
    }
}
