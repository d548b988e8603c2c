//! Limits of control groups, version 1 and 2: the kernel kills inside a group although the machine has memory left.

use std::path::{Component, Path, PathBuf};

use super::{
    MemorySource,
    kernel_file::{Buffer, KernelFile, field, number},
};

/// A version 1 group without a limit tells the largest number of pages, whose bytes depend on the page size.
const NO_LIMIT: u64 = 1 << 62;

/// The limit of a process's groups, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The lowest limit on the way from the process's group to the root.
    pub limit: u64,
    /// What the fullest of the groups can still take: its limit less its usage, pages of files that can be dropped not
    /// counted as used.
    pub available: u64,
}

/// Names of a version's files and of the lines that tell how many bytes of files are cached.
struct Layout {
    limits: &'static [&'static str],
    usage: &'static str,
    cached: [&'static str; 2],
    /// The line with the lowest limit of all groups above, also of those that a container does not see.
    outer_limit: Option<&'static str>,
}

const V1: Layout = Layout {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
    outer_limit: Some("hierarchical_memory_limit"),
};

/// Beyond `memory.high` a group is not killed but slowed down until it hardly moves, which is no better.
const V2: Layout = Layout {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cached: ["inactive_file", "active_file"],
    outer_limit: None,
};

/// One group, its files open.
struct Group {
    layout: &'static Layout,
    limits: Vec<KernelFile>,
    usage: KernelFile,
    stat: Option<KernelFile>,
    outer_limit: Option<u64>,
}

impl Group {
    fn open(folder: &Path, layout: &'static Layout, buffer: &mut Buffer) -> Option<Group> {
        let open = |name: &str| KernelFile::open(&folder.join(name));
        let stat = open("memory.stat");
        let outer_limit = stat
            .as_ref()
            .and_then(|stat| field(stat.read(buffer)?, layout.outer_limit?))
            .filter(|n| *n < NO_LIMIT);
        Some(Group {
            layout,
            limits: layout.limits.iter().filter_map(|name| open(name)).collect(),
            usage: open(layout.usage)?,
            stat,
            outer_limit,
        })
    }

    /// Pages of files are not looked up if `enough` is left without dropping any.
    fn read(&self, enough: u64, buffer: &mut Buffer) -> Option<CgroupMemory> {
        let own = self.limits.iter().filter_map(|file| number(file.read(buffer)?)).filter(|n| *n < NO_LIMIT);
        let limit = own.chain(self.outer_limit).min()?;
        let usage = number(self.usage.read(buffer)?)?;
        let left = limit.saturating_sub(usage);
        let cached = if left < enough { self.cached(buffer) } else { 0 };
        Some(CgroupMemory { limit, available: limit.saturating_sub(usage.saturating_sub(cached)) })
    }

    /// Bytes of files in memory.
    fn cached(&self, buffer: &mut Buffer) -> u64 {
        let Some(text) = self.stat.as_ref().and_then(|stat| stat.read(buffer)) else { return 0 };
        self.layout.cached.iter().filter_map(|name| field(text, name)).fold(0, u64::saturating_add)
    }
}

/// The groups of a process from its own up to the root.
pub(super) struct Cgroups(Vec<Group>);

impl Cgroups {
    /// `process` is a folder of /proc.
    pub(super) fn open(source: &MemorySource, process: &Path, buffer: &mut Buffer) -> Cgroups {
        let read = |name: &str| std::fs::read(process.join(name)).unwrap_or_default();
        let (memberships, mounts) = (read("cgroup"), read("mountinfo"));
        let folders = folders(&String::from_utf8_lossy(&memberships), &String::from_utf8_lossy(&mounts));
        let groups = folders
            .into_iter()
            .filter_map(|(folder, layout)| Group::open(&source.path(folder), layout, buffer));
        Cgroups(groups.collect())
    }

    /// `None` without a limit.
    pub(super) fn read(&self, enough: u64, buffer: &mut Buffer) -> Option<CgroupMemory> {
        self.0.iter().filter_map(|group| group.read(enough, buffer)).reduce(|a, b| CgroupMemory {
            limit: a.limit.min(b.limit),
            available: a.available.min(b.available),
        })
    }
}

/// The folders of a process's memory groups, by the texts of its `cgroup` and `mountinfo`.
fn folders(memberships: &str, mounts: &str) -> Vec<(PathBuf, &'static Layout)> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let layout = match controllers {
            "" => &V2,
            _ if controllers.split(',').any(|c| c == "memory") => &V1,
            _ => return None,
        };
        let mount = mounts.lines().find_map(|line| Mount::parse(line, layout))?;
        Some(
            mount
                .folders(Path::new(path))
                .into_iter()
                .map(move |folder| (folder, layout))
                .collect::<Vec<_>>(),
        )
    };
    memberships.lines().filter_map(of_line).flatten().collect()
}

/// Where a hierarchy of groups, or in a container a part of it, is mounted.
struct Mount {
    /// The group that is visible at `point`.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// A line of `mountinfo` (proc_pid_mountinfo(5)), if it mounts the groups of this version.
    fn parse(line: &str, layout: &'static Layout) -> Option<Mount> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let (kind, _, options) = (file_system.next()?, file_system.next()?, file_system.next()?);
        let fits = match layout.outer_limit {
            Some(_) => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
            None => kind == "cgroup2",
        };
        let mut fields = mount.split(' ').skip(3);
        fits.then(|| Some(Mount { root: fields.next()?.into(), point: fields.next()?.into() }))?
    }

    /// The folder of a group and of all above it. One that is not below what is mounted is not visible by its own name:
    /// then the mount itself is the nearest that is.
    fn folders(&self, group: &Path) -> Vec<PathBuf> {
        let outside = group.components().any(|part| part == Component::ParentDir);
        let below = group.strip_prefix(&self.root).ok().filter(|_| !outside).unwrap_or(Path::new(""));
        below.ancestors().map(|ancestor| self.point.join(ancestor)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::folders;

    fn names(memberships: &str, mounts: &str) -> Vec<String> {
        folders(memberships, mounts).into_iter().map(|(folder, _)| folder.display().to_string()).collect()
    }

    const V1_MOUNT: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory";
    const V2_MOUNT: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";

    #[test]
    fn the_whole_hierarchy_is_found() {
        let nested = names("0::/user.slice/app.scope\n", V2_MOUNT);
        assert_eq!(
            nested,
            ["/sys/fs/cgroup/user.slice/app.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/"]
        );
        let hybrid = "9:name=systemd:/\n4:cpu,memory:/jobs\n0::/\n";
        assert_eq!(names(hybrid, V1_MOUNT), ["/sys/fs/cgroup/memory/jobs", "/sys/fs/cgroup/memory/"]);
        assert_eq!(names("0::/", "").len(), 0);
    }

    #[test]
    fn containers_see_a_part_of_it() {
        let mounted = V1_MOUNT.replace(" / /", " /docker/abc /");
        assert_eq!(names("4:memory:/docker/abc", &mounted), ["/sys/fs/cgroup/memory/"]);
        assert_eq!(
            names("4:memory:/docker/abc/x", &mounted),
            ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory/"]
        );
        assert_eq!(names("4:memory:/elsewhere", &mounted), ["/sys/fs/cgroup/memory/"]);
        assert_eq!(names("0::/../../outside", V2_MOUNT), ["/sys/fs/cgroup/"]);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(memberships in "[0-9:/a\n.]{0,40}", mounts in "[0-9 /a,\n-]{0,80}") {
            let _ = folders(&memberships, &mounts);
            let _ = folders(&memberships, &format!("{mounts} - cgroup2 x rw"));
        }
    }
}
