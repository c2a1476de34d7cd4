//! The lines on stdout that announce that the server is ready, with its addresses.

use std::fmt;
use std::io::Write as _;
use std::net::SocketAddr;

use super::listeners::{Addresses, ListenerTls, Listeners, scheme};
use crate::config::{Config, Role};

/// The lines of a server that has bound its listeners.
pub(super) struct ReadyLines {
    /// One line for each proxy, and one for the portal.
    further: Vec<String>,
    ready: ReadyLine,
}

impl ReadyLines {
    pub(super) fn new(config: &Config, listeners: &Listeners, tls: &ListenerTls) -> Self {
        let Addresses { public, admin, portal, proxies } = &listeners.at;
        let proxies = config.proxies.iter().zip(proxies).map(|(proxy, at)| {
            format!("hapax proxy {} http://{at} -> {}", proxy.name, proxy.upstream)
        });
        let portal = portal.filter(|_| listeners.portal.is_some());
        let portal = portal.map(|at| format!("hapax portal {}://{at}", scheme(&tls.portal)));
        let ready = ReadyLine {
            ingress: listeners.public.is_some().then_some((scheme(&tls.public), *public)),
            admin: listeners.admin.is_some().then_some((scheme(&tls.admin), *admin)),
            background: [Role::Worker, Role::Sender]
                .into_iter()
                .filter(|role| config.settings.roles.has(*role))
                .collect(),
        };
        Self { further: proxies.chain(portal).collect(), ready }
    }

    /// Prints the addresses on stdout, and in dev mode a command to try. A closed stdout is ignored.
    pub(super) fn print(&self, config: &Config) {
        let Self { further, ready } = self;
        let mut out = std::io::stdout().lock();
        for line in further {
            let _ = writeln!(out, "{line}");
        }
        let _ = writeln!(out, "{ready}");
        if let (Some(dev), Some((_, public_address)), Some((_, admin_address))) =
            (&config.dev, ready.ingress, ready.admin)
        {
            let program = program();
            let secret_file = dev.secret_file.display();
            let command = first_command(config, public_address).unwrap_or_default();
            let _ = writeln!(
                out,
                "\nNo config file, so this is dev mode: {} senders on loopback, each with a secret derived from \
                 {secret_file}.\nSend an event, then send it again:\n\n  {command}\n\n\
                 Then open http://{admin_address}/ in a browser, or list the events:\n\n  \
                 curl http://{admin_address}/api/v1/events\n\n\
                 `{program} init` writes a config file to start from; `{program} providers` lists the senders.",
                config.sources.len(),
            );
        }
        let _ = out.flush();
    }
}

/// The line that announces that the process is ready, with its addresses.
struct ReadyLine {
    ingress: Option<(&'static str, SocketAddr)>,
    admin: Option<(&'static str, SocketAddr)>,
    /// Roles without a listener, printed if the process has no other role.
    background: Vec<Role>,
}

impl fmt::Display for ReadyLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("hapax ready:")?;
        if let Some((scheme, at)) = self.ingress {
            write!(f, " ingress {scheme}://{at}")?;
        }
        if let Some((scheme, at)) = self.admin {
            write!(f, " admin {scheme}://{at}")?;
        }
        if self.ingress.is_none() && self.admin.is_none() {
            for role in &self.background {
                write!(f, " {}", role.as_str())?;
            }
        }
        Ok(())
    }
}

/// The command that sends a first event, in dev mode.
pub(super) fn first_command(config: &Config, public_address: SocketAddr) -> Option<String> {
    let secret_file = config.dev.as_ref()?.secret_file.display();
    Some(format!(
        "{} send stripe payout.paid --id evt_1 --to http://{public_address}/webhooks/stripe --secret-file \
         {secret_file}",
        program()
    ))
}

/// The name under which the process was started.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "hapax".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_names_the_roles_of_this_process() {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let check =
            |ingress: Option<u16>, admin: Option<u16>, background: &[Role], expected: &str| {
                let ingress = ingress.map(|port| ("http", at(port)));
                let admin = admin.map(|port| ("http", at(port)));
                let ready = ReadyLine { ingress, admin, background: background.to_vec() };
                assert_eq!(ready.to_string(), expected);
            };
        let all = [Role::Worker, Role::Sender];
        let both = "hapax ready: ingress http://127.0.0.1:80 admin http://127.0.0.1:81";
        check(Some(80), Some(81), &all, both);
        check(Some(80), None, &[], "hapax ready: ingress http://127.0.0.1:80");
        check(None, None, &[Role::Worker], "hapax ready: worker");
        // A script that waits for the line of a worker must not match the line of a sender.
        check(None, None, &[Role::Sender], "hapax ready: sender");
    }
}
