//! The contents that a disk may have after a power loss.
//!
//! The model is a file system with the weakest guarantees. A change is certain only after a sync that began
//! when the change had ended: of a file for its bytes and size, of a directory for the names in it. Until
//! then, each 512-byte sector of the change may be on disk or not, independently of every other change.
//! After a failed sync, the changes that it covered stay uncertain: Linux marks those pages as clean, and
//! the next sync skips them and reports success.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::recording::DiskStep;

/// The unit that a disk writes atomically.
const SECTOR_BYTES: u64 = 512;

/// A generator of random numbers: the same seed makes the same numbers.
#[derive(Debug, Clone)]
pub struct SeededRng(u64);

impl SeededRng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number in `0..below`.
    pub fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % below.max(1) as u64) as usize
    }

    fn chance(&mut self, of: usize, out_of: usize) -> bool {
        self.below(out_of) < of
    }
}

/// The state of a disk after some steps of a recording.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    root: PathBuf,
    files: Vec<File>,
    /// The names as the running process sees them.
    live: BTreeMap<PathBuf, Node>,
    /// Every change of names, in order.
    names: Vec<NameChange>,
    /// Running syncs, and the changes that each makes certain if it succeeds.
    syncs: BTreeMap<usize, Sync>,
    next: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    File(usize),
    Dir,
}

#[derive(Debug, Clone, Default)]
struct File {
    /// The certain content, before all of `changes`.
    base: Vec<u8>,
    changes: Vec<Change>,
}

#[derive(Debug, Clone)]
struct Change {
    step: usize,
    kind: ChangeKind,
    durability: Durability,
}

#[derive(Debug, Clone)]
enum ChangeKind {
    Bytes { offset: u64, bytes: Vec<u8> },
    Size(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durability {
    /// The call has not returned.
    Begun,
    /// The write may be on disk.
    Ended,
    /// The write is on disk.
    Certain,
    /// The write may be on disk, and no later sync makes it certain.
    Doubtful,
}

#[derive(Debug, Clone)]
struct NameChange {
    set: Vec<(PathBuf, Option<Node>)>,
    /// The directories that must be synced before this is certain.
    awaits: BTreeSet<PathBuf>,
}

#[derive(Debug, Clone)]
enum Sync {
    File { file: usize, changes: Vec<usize> },
    Dir { path: PathBuf, names: usize },
}

/// Which uncertain changes an image contains.
#[derive(Clone, Copy)]
enum Survivors {
    Nothing,
    Everything,
    Sectors(usize),
    Writes(usize),
    /// All changes that began before this step.
    Before(usize),
    /// All changes but the one of this step.
    Without(usize),
}

impl Disk {
    /// A disk on which all files below `root` are certain, with their names.
    pub fn at(root: &Path) -> Self {
        let mut disk = Self { root: root.to_owned(), ..Self::default() };
        disk.load(root);
        disk
    }

    fn load(&mut self, dir: &Path) {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let node = if path.is_dir() {
                self.load(&path);
                Node::Dir
            } else {
                let base = std::fs::read(&path).expect("a file");
                self.files.push(File { base, changes: Vec::new() });
                Node::File(self.files.len() - 1)
            };
            self.live.insert(path.clone(), node);
            self.names.push(NameChange { set: vec![(path, Some(node))], awaits: BTreeSet::new() });
        }
    }

    /// Replays the first `through` steps.
    pub fn advance(&mut self, steps: &[DiskStep], through: usize) {
        while self.next < through {
            let step = self.next;
            self.next += 1;
            match &steps[step] {
                DiskStep::Create(path) => self.create(path),
                DiskStep::CreateDir(path) => self.name(vec![(path.clone(), Some(Node::Dir))]),
                DiskStep::Remove(path) => self.name(vec![(path.clone(), None)]),
                DiskStep::Rename(from, to) => {
                    let node = self.live.get(from).copied();
                    self.name(vec![(from.clone(), None), (to.clone(), node)]);
                }
                DiskStep::Link(from, to) => {
                    let node = self.live.get(from).copied();
                    self.name(vec![(to.clone(), node)]);
                }
                DiskStep::Write { path, offset, bytes } => {
                    let kind = ChangeKind::Bytes { offset: *offset, bytes: bytes.clone() };
                    self.change(step, path, kind);
                }
                DiskStep::Resize { path, size } => self.change(step, path, ChangeKind::Size(*size)),
                DiskStep::Sync(path) => self.sync(step, path),
                DiskStep::Ended { step, result } => self.ended(*step, &steps[*step], result),
                DiskStep::Send(_) => {}
            }
        }
    }

    fn create(&mut self, path: &Path) {
        if self.live.contains_key(path) {
            return;
        }
        self.files.push(File::default());
        self.name(vec![(path.to_owned(), Some(Node::File(self.files.len() - 1)))]);
    }

    fn name(&mut self, set: Vec<(PathBuf, Option<Node>)>) {
        let mut awaits = BTreeSet::new();
        for (path, node) in &set {
            match node {
                Some(node) => self.live.insert(path.clone(), *node),
                None => self.live.remove(path),
            };
            awaits.extend(path.parent().map(Path::to_owned));
        }
        self.names.push(NameChange { set, awaits });
    }

    fn file(&self, path: &Path) -> Option<usize> {
        match self.live.get(path) {
            Some(Node::File(file)) => Some(*file),
            Some(Node::Dir) | None => None,
        }
    }

    fn change(&mut self, step: usize, path: &Path, kind: ChangeKind) {
        // A file that was removed while it is open does not matter.
        if let Some(file) = self.file(path) {
            self.files[file].changes.push(Change { step, kind, durability: Durability::Begun });
        }
    }

    fn sync(&mut self, step: usize, path: &Path) {
        let sync = match self.file(path) {
            Some(file) => {
                let changes = self.files[file].changes.iter();
                let ended = changes.filter(|change| change.durability == Durability::Ended);
                Sync::File { file, changes: ended.map(|change| change.step).collect() }
            }
            None => Sync::Dir { path: path.to_owned(), names: self.names.len() },
        };
        self.syncs.insert(step, sync);
    }

    fn ended(&mut self, step: usize, what: &DiskStep, result: &Result<u64, String>) {
        match self.syncs.remove(&step) {
            Some(Sync::File { file, changes }) => {
                let durability =
                    if result.is_ok() { Durability::Certain } else { Durability::Doubtful };
                self.files[file].decide(&changes, durability);
            }
            Some(Sync::Dir { path, names }) if result.is_ok() => {
                for naming in &mut self.names[..names] {
                    naming.awaits.remove(&path);
                }
            }
            Some(Sync::Dir { .. }) => {}
            None => self.changed(step, what, result),
        }
    }

    fn changed(&mut self, step: usize, what: &DiskStep, result: &Result<u64, String>) {
        let (DiskStep::Write { path, .. } | DiskStep::Resize { path, .. }) = what else { return };
        let Some(file) = self.file(path) else { return };
        let changes = &mut self.files[file].changes;
        let Some(at) = changes.iter().position(|change| change.step == step) else { return };
        match (result, &mut changes[at].kind) {
            (Ok(written), ChangeKind::Bytes { bytes, .. }) => bytes.truncate(*written as usize),
            (Ok(_), ChangeKind::Size(_)) => {}
            (Err(_), _) => {
                changes.remove(at);
                return;
            }
        }
        changes[at].durability = Durability::Ended;
    }

    /// Whether a failed sync left an uncertain change of this file that no later sync writes.
    pub fn is_doubtful(&self, path: &Path) -> bool {
        let changes = self.file(path).map(|file| &self.files[file].changes);
        changes
            .is_some_and(|changes| changes.iter().any(|one| one.durability == Durability::Doubtful))
    }

    /// Writes one image into the empty directory `into`, which replaces the root.
    pub fn image(&self, rng: &mut SeededRng, into: &Path) {
        let survivors = self.survivors(rng);
        let mut names: BTreeMap<&Path, Node> = BTreeMap::new();
        for naming in &self.names {
            let kept = match survivors {
                _ if naming.awaits.is_empty() => true,
                Survivors::Nothing => false,
                Survivors::Everything | Survivors::Before(_) | Survivors::Without(_) => true,
                Survivors::Sectors(_) | Survivors::Writes(_) => rng.chance(1, 2),
            };
            if !kept {
                continue;
            }
            for (path, node) in &naming.set {
                match node {
                    Some(node) => names.insert(path, *node),
                    None => names.remove(path.as_path()),
                };
            }
        }
        // The entries are in the order of their names, so that a directory comes before its files.
        for (path, node) in names {
            let below = path.strip_prefix(&self.root).expect("recorded below the root");
            let place = into.join(below);
            // A directory whose name is lost loses its files.
            if place.parent().is_some_and(Path::is_dir) {
                match node {
                    Node::Dir => std::fs::create_dir(&place).expect("a directory"),
                    Node::File(file) => {
                        let bytes = self.files[file].drawn(survivors, rng);
                        std::fs::write(&place, bytes).expect("a file");
                    }
                }
            }
        }
    }

    fn survivors(&self, rng: &mut SeededRng) -> Survivors {
        let open: Vec<usize> = self
            .files
            .iter()
            .flat_map(|file| &file.changes)
            .filter(|change| change.durability != Durability::Certain)
            .map(|change| change.step)
            .collect();
        let some = open.get(rng.below(open.len())).copied().unwrap_or(0);
        match rng.below(10) {
            0 | 1 => Survivors::Nothing,
            2 => Survivors::Everything,
            3 => Survivors::Sectors(1 + rng.below(15)),
            4 => Survivors::Sectors(8),
            5 => Survivors::Writes(8),
            6 => Survivors::Writes(1 + rng.below(15)),
            7 => Survivors::Before(some),
            _ => Survivors::Without(some),
        }
    }
}

impl File {
    /// Sets the durability of these changes, and applies the certain ones to the base.
    fn decide(&mut self, steps: &[usize], durability: Durability) {
        for change in &mut self.changes {
            if change.durability == Durability::Ended && steps.binary_search(&change.step).is_ok() {
                change.durability = durability;
            }
        }
        self.forget_overwritten();
        let certain = self
            .changes
            .iter()
            .take_while(|change| change.durability == Durability::Certain)
            .count();
        for change in self.changes.drain(..certain) {
            match change.kind {
                ChangeKind::Bytes { offset, bytes } => put(&mut self.base, offset as usize, &bytes),
                ChangeKind::Size(size) => self.base.resize(size as usize, 0),
            }
        }
    }

    /// Removes uncertain changes that a certain change has overwritten.
    fn forget_overwritten(&mut self) {
        let mut at = 0;
        while at < self.changes.len() {
            let (before, after) = self.changes.split_at(at + 1);
            let doubtful = &before[at];
            let over = |later: &Change| {
                later.durability == Durability::Certain && later.kind.covers(&doubtful.kind)
            };
            if doubtful.durability == Durability::Doubtful && after.iter().any(over) {
                self.changes.remove(at);
            } else {
                at += 1;
            }
        }
    }

    fn drawn(&self, survivors: Survivors, rng: &mut SeededRng) -> Vec<u8> {
        let mut content = self.base.clone();
        for change in &self.changes {
            let certain = change.durability == Durability::Certain;
            let whole = match survivors {
                _ if certain => true,
                Survivors::Nothing => false,
                Survivors::Everything => true,
                Survivors::Sectors(_) => false,
                Survivors::Writes(of) => rng.chance(of, 16),
                Survivors::Before(step) => change.step < step,
                Survivors::Without(step) => change.step != step,
            };
            match (&change.kind, whole, survivors) {
                (ChangeKind::Bytes { offset, bytes }, true, _) => {
                    put(&mut content, *offset as usize, bytes);
                }
                (ChangeKind::Bytes { offset, bytes }, false, Survivors::Sectors(of)) => {
                    for (at, sector) in sectors(*offset, bytes) {
                        if rng.chance(of, 16) {
                            put(&mut content, at, sector);
                        }
                    }
                }
                (ChangeKind::Bytes { offset, bytes }, false, _) => {
                    // The size may have changed without the bytes.
                    let end = *offset as usize + bytes.len();
                    if content.len() < end && rng.chance(1, 8) {
                        content.resize(end, 0);
                    }
                }
                (ChangeKind::Size(size), true, _) => content.resize(*size as usize, 0),
                (ChangeKind::Size(size), false, Survivors::Sectors(of)) => {
                    if rng.chance(of, 16) {
                        content.resize(*size as usize, 0);
                    }
                }
                (ChangeKind::Size(_), false, _) => {}
            }
        }
        content
    }
}

impl ChangeKind {
    /// Whether this change overwrites all of `earlier`.
    fn covers(&self, earlier: &Self) -> bool {
        match (self, earlier) {
            (
                Self::Bytes { offset, bytes },
                Self::Bytes { offset: earlier, bytes: their_bytes },
            ) => {
                *offset <= *earlier
                    && *offset + bytes.len() as u64 >= *earlier + their_bytes.len() as u64
            }
            (Self::Size(size), Self::Bytes { offset, .. }) => size <= offset,
            (Self::Size(size), Self::Size(earlier)) => size <= earlier,
            (Self::Bytes { .. }, Self::Size(_)) => false,
        }
    }
}

fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if content.len() < at + bytes.len() {
        content.resize(at + bytes.len(), 0);
    }
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The parts of a write that a disk writes atomically.
fn sectors(offset: u64, bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let first = (SECTOR_BYTES - offset % SECTOR_BYTES).min(bytes.len() as u64) as usize;
    let (head, rest) = bytes.split_at(first);
    let rest_at = offset as usize + first;
    let rest = rest.chunks(SECTOR_BYTES as usize).enumerate();
    std::iter::once((offset as usize, head))
        .chain(rest.map(move |(n, sector)| (rest_at + n * SECTOR_BYTES as usize, sector)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The contents that `/d/a` has in 100 images after all of `steps`.
    fn contents(steps: &[DiskStep]) -> BTreeSet<Option<Vec<u8>>> {
        let mut disk = Disk { root: "/d".into(), ..Disk::default() };
        disk.advance(steps, steps.len());
        let mut rng = SeededRng::new(1);
        let seen = (0..100).map(|_| {
            let image = tempfile::tempdir().expect("a directory");
            disk.image(&mut rng, image.path());
            std::fs::read(image.path().join("a")).ok()
        });
        seen.collect()
    }

    fn write(offset: u64, bytes: &[u8]) -> DiskStep {
        DiskStep::Write { path: "/d/a".into(), offset, bytes: bytes.to_vec() }
    }

    fn ended(step: usize) -> DiskStep {
        DiskStep::Ended { step, result: Ok(1) }
    }

    fn made() -> Vec<DiskStep> {
        vec![DiskStep::Create("/d/a".into()), DiskStep::Sync("/d".into()), ended(1)]
    }

    #[test]
    fn synced_data_is_always_there_and_the_rest_may_be() {
        let mut steps = made();
        steps.extend([write(0, b"x"), ended(3), DiskStep::Sync("/d/a".into()), ended(5)]);
        assert_eq!(contents(&steps), BTreeSet::from([Some(b"x".to_vec())]));
        steps.extend([write(0, b"y"), ended(7)]);
        let either = BTreeSet::from([Some(b"x".to_vec()), Some(b"y".to_vec())]);
        assert_eq!(contents(&steps), either);
        // A sync that has not ended promises nothing.
        steps.push(DiskStep::Sync("/d/a".into()));
        assert_eq!(contents(&steps), either);
        // A write during the sync is not part of it.
        steps.extend([write(0, b"z"), ended(10), ended(9)]);
        assert!(contents(&steps).contains(&Some(b"y".to_vec())));
        assert!(!contents(&steps).contains(&Some(b"x".to_vec())));
    }

    #[test]
    fn a_name_is_certain_once_its_directory_is_synced() {
        let steps = [
            DiskStep::Create("/d/a".into()),
            write(0, b"x"),
            ended(1),
            DiskStep::Sync("/d/a".into()),
            ended(3),
        ];
        assert!(contents(&steps).contains(&None), "without a sync of the directory");
        assert!(!contents(&made()).contains(&None));
    }

    #[test]
    fn a_failed_sync_leaves_doubt_that_only_a_new_write_ends() {
        let mut steps = made();
        steps.extend([write(0, b"x"), ended(3), DiskStep::Sync("/d/a".into())]);
        steps.push(DiskStep::Ended { step: 5, result: Err("EIO".into()) });
        steps.extend([DiskStep::Sync("/d/a".into()), ended(7)]);
        assert!(contents(&steps).contains(&Some(Vec::new())), "the next sync does not help");
        steps.extend([write(0, b"x"), ended(9), DiskStep::Sync("/d/a".into()), ended(11)]);
        assert_eq!(contents(&steps), BTreeSet::from([Some(b"x".to_vec())]));
    }

    #[test]
    fn a_write_is_torn_at_the_edges_of_sectors() {
        let mut steps = made();
        steps.extend([write(510, &[1; 514]), ended(3)]);
        for content in contents(&steps).into_iter().flatten() {
            let parts = [content.get(510..512), content.get(512..1024)];
            for part in parts.into_iter().flatten() {
                assert!(part.iter().all(|byte| *byte == part[0]), "{content:?}");
            }
        }
    }
}
