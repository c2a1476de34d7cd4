//! `[tls]` and `admin_tls`: the certificate and key of the public and of the admin side. Both are loaded with
//! the config, so that a wrong file is a config error and not a failed handshake later.

use std::path::PathBuf;
use std::sync::Arc;

use hapax_engine::tls::{Certificate, TlsError};

use super::document::{Entry, Section};
use super::problem::InvalidSetting;
use super::reader::ConfigReader;

impl ConfigReader<'_> {
    /// Reads the table `name`, if there is one.
    pub(super) fn tls(&mut self, root: &Section<'_>, name: &str) -> Option<Arc<Certificate>> {
        let section = root.get(name)?.section(&mut self.problems)?;
        section.expect(&["cert", "key"], &mut self.problems);
        let cert = self.pem_file(&section, "cert");
        let key = self.pem_file(&section, "key");
        let ((cert_entry, cert), (key_entry, key)) = (cert?, key?);
        let error = match Certificate::load(&cert, &key) {
            Ok(certificate) => return Some(certificate),
            Err(error) => error,
        };
        let (entry, hint) = match &error {
            TlsError::File { file, .. } if *file == cert => {
                (cert_entry, "write a PEM file with the server's certificate first, then the chain")
            }
            TlsError::File { .. } => {
                (key_entry, "write a PEM file with one private key: PKCS#8, PKCS#1 or SEC1")
            }
            TlsError::Pair { .. } => {
                (key_entry, "use the key of the first certificate in the file")
            }
        };
        entry.report(InvalidSetting::new(error.to_string(), hint), &mut self.problems);
        None
    }

    fn pem_file<'d>(&mut self, section: &Section<'d>, name: &str) -> Option<(Entry<'d>, PathBuf)> {
        let Some(entry) = section.get(name) else {
            let invalid = InvalidSetting::new(
                format!("has no {name}"),
                "TLS needs both cert and key, as PEM files",
            );
            section.report(invalid, &mut self.problems);
            return None;
        };
        let text = entry.text(&mut self.problems)?;
        let path = PathBuf::from(text.strip_prefix("file:").unwrap_or(text));
        self.watched.push(path.clone());
        Some((entry, path))
    }
}
