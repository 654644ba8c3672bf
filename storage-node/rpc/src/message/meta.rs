//! Messages that the metadata service answers.

use bytes::Bytes;
use chain::id::{ClientId, InodeId};
use chain::layout::Layout;

use crate::{request, wire_enum, wire_fields, wire_struct};

wire_fields!(Layout { table: u32, chains: u32, stripe: u32, chunk_size_bytes: u32, seed: u64 });

/// The root directory of every cluster.
pub const ROOT: InodeId = InodeId::new(1);
/// Most bytes of one name.
pub const NAME_MAX: usize = 255;
/// Most bytes of a symbolic link's target.
pub const SYMLINK_MAX: usize = 4095;

wire_struct! {
    /// Who asks, and which request this is: a retry carries the same pair and changes nothing
    /// again.
    pub struct Caller {
        /// The client process.
        pub client: ClientId,
        /// Grows by one with each new request of the client.
        pub request: u64,
        /// The user on whose behalf it asks.
        pub uid: u32,
        /// The user's group.
        pub gid: u32,
    }
}

/// What an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
}
wire_enum!(FileKind { File = 1, Directory = 2, Symlink = 3, });

wire_struct! {
    /// An inode as clients see it.
    pub struct Attributes {
        /// The inode.
        pub inode: InodeId,
        /// What it is.
        pub kind: FileKind,
        /// Permission bits, without the type.
        pub mode: u32,
        /// Owner.
        pub uid: u32,
        /// Group.
        pub gid: u32,
        /// Number of names.
        pub links: u32,
        /// Bytes of a file as last reported, of a link's target; 0 for a directory.
        pub length: u64,
        /// Nanoseconds since 1970.
        pub accessed_ns: u64,
        /// Nanoseconds since 1970.
        pub modified_ns: u64,
        /// Nanoseconds since 1970.
        pub changed_ns: u64,
        /// Grows at each truncation that shortens; sent with every write.
        pub truncate_generation: u64,
        /// Where a file's chunks live; none for other kinds.
        pub layout: Option<Layout>,
    }
}

wire_struct! {
    /// Finds a name in a directory.
    pub struct Lookup {
        /// The directory.
        pub parent: InodeId,
        /// One name, no slash.
        pub name: Bytes,
    }
}
request!(Lookup = 0x0301 -> Attributes);

wire_struct! {
    /// Attributes of an inode.
    pub struct GetAttributes {
        /// The inode.
        pub inode: InodeId,
    }
}
request!(GetAttributes = 0x0302 -> Attributes);

wire_struct! {
    /// Changes attributes; the length goes through [`Truncate`].
    pub struct SetAttributes {
        /// Who asks.
        pub caller: Caller,
        /// The inode.
        pub inode: InodeId,
        /// New permission bits.
        pub mode: Option<u32>,
        /// New owner.
        pub uid: Option<u32>,
        /// New group.
        pub gid: Option<u32>,
        /// New access time in nanoseconds since 1970.
        pub accessed_ns: Option<u64>,
        /// New modification time in nanoseconds since 1970.
        pub modified_ns: Option<u64>,
    }
}
request!(SetAttributes = 0x0303 -> Attributes);

wire_struct! {
    /// Makes a file and opens it for writing. If it exists and `exclusive` is not set, opens that.
    pub struct Create {
        /// Who asks.
        pub caller: Caller,
        /// The directory.
        pub parent: InodeId,
        /// The new name.
        pub name: Bytes,
        /// Permission bits.
        pub mode: u32,
        /// Whether an existing file is an error.
        pub exclusive: bool,
    }
}

wire_struct! {
    /// An open file.
    pub struct Opened {
        /// The file.
        pub attributes: Attributes,
        /// Names this opening for writing in length reports and at close; 0 if for reading only.
        pub session: u64,
    }
}
request!(Create = 0x0304 -> Opened);

wire_struct! {
    /// Opens a file.
    pub struct Open {
        /// Who asks.
        pub caller: Caller,
        /// The file.
        pub inode: InodeId,
        /// Whether it will be written: makes a session that keeps the chunks of an unlinked file.
        pub write: bool,
    }
}
request!(Open = 0x0305 -> Opened);

wire_struct! {
    /// Reports how far a file reaches after writes: the stored length becomes at least `length`
    /// if `truncate_generation` is still the file's. Sent at fsync and close.
    pub struct ReportLength {
        /// Who asks.
        pub caller: Caller,
        /// The file.
        pub inode: InodeId,
        /// The session of the opening.
        pub session: u64,
        /// End of the furthest write in bytes.
        pub length: u64,
        /// The generation under which it was written.
        pub truncate_generation: u64,
        /// Modification time in nanoseconds since 1970.
        pub modified_ns: u64,
        /// Whether this ends the session.
        pub close: bool,
    }
}
request!(ReportLength = 0x0306 -> Attributes);

wire_struct! {
    /// Sets the length of a file. When it is answered the chunks are cut, so that no byte behind
    /// the length comes back; the answer carries the new truncate generation for later writes.
    pub struct Truncate {
        /// Who asks.
        pub caller: Caller,
        /// The file.
        pub inode: InodeId,
        /// The new length in bytes.
        pub length: u64,
    }
}
request!(Truncate = 0x0307 -> Attributes);

wire_struct! {
    /// Makes a directory.
    pub struct MakeDirectory {
        /// Who asks.
        pub caller: Caller,
        /// The directory that gets it.
        pub parent: InodeId,
        /// The new name.
        pub name: Bytes,
        /// Permission bits.
        pub mode: u32,
    }
}
request!(MakeDirectory = 0x0308 -> Attributes);

wire_struct! {
    /// Makes a symbolic link.
    pub struct MakeSymlink {
        /// Who asks.
        pub caller: Caller,
        /// The directory that gets it.
        pub parent: InodeId,
        /// The new name.
        pub name: Bytes,
        /// What it points to.
        pub target: Bytes,
    }
}
request!(MakeSymlink = 0x0309 -> Attributes);

wire_struct! {
    /// The target of a symbolic link.
    pub struct ReadSymlink {
        /// The link.
        pub inode: InodeId,
    }
}

wire_struct! {
    /// Answer to [`ReadSymlink`].
    pub struct SymlinkTarget {
        /// What it points to.
        pub target: Bytes,
    }
}
request!(ReadSymlink = 0x030a -> SymlinkTarget);

wire_struct! {
    /// Removes a name: a file or link, or an empty directory if `directory` is set. The bytes of a
    /// file go when its last name is gone and nobody has it open for writing.
    pub struct Remove {
        /// Who asks.
        pub caller: Caller,
        /// The directory.
        pub parent: InodeId,
        /// The name.
        pub name: Bytes,
        /// Whether the name must be a directory, else it must not be one.
        pub directory: bool,
    }
}
request!(Remove = 0x030b -> ());

wire_struct! {
    /// Renames, replacing a file or an empty directory of the new name.
    pub struct Rename {
        /// Who asks.
        pub caller: Caller,
        /// The old directory.
        pub parent: InodeId,
        /// The old name.
        pub name: Bytes,
        /// The new directory.
        pub new_parent: InodeId,
        /// The new name.
        pub new_name: Bytes,
        /// Whether an existing new name is an error.
        pub no_replace: bool,
    }
}
request!(Rename = 0x030c -> ());

wire_struct! {
    /// Lists a directory from a cookie on. Entries that exist throughout are listed exactly once.
    pub struct ReadDirectory {
        /// The directory.
        pub inode: InodeId,
        /// 0 for the start, else the cookie of the last entry seen.
        pub cookie: u64,
        /// Most entries.
        pub limit: u32,
    }
}

wire_struct! {
    /// One name of a directory.
    pub struct DirectoryEntry {
        /// The name.
        pub name: Bytes,
        /// Continues behind this entry; stable over restarts and other changes.
        pub cookie: u64,
        /// What it names.
        pub attributes: Attributes,
    }
}

wire_struct! {
    /// Answer to [`ReadDirectory`].
    pub struct DirectoryPage {
        /// In order of cookie.
        pub entries: Vec<DirectoryEntry>,
        /// Whether the directory has no entries behind these.
        pub end: bool,
        /// The directory that holds this one; the root holds itself.
        pub parent: InodeId,
    }
}
request!(ReadDirectory = 0x030d -> DirectoryPage);

wire_struct! {
    /// Asks for the sizes of the file system.
    pub struct StatFileSystem {
        /// Any inode.
        pub inode: InodeId,
    }
}

wire_struct! {
    /// Answer to [`StatFileSystem`].
    pub struct FileSystemStat {
        /// Bytes of all disks, divided by the number of replicas.
        pub capacity_bytes: u64,
        /// Bytes free of them.
        pub free_bytes: u64,
        /// Number of inodes.
        pub inodes: u64,
    }
}
request!(StatFileSystem = 0x030e -> FileSystemStat);

wire_struct! {
    /// Keeps a client's sessions alive; sent every ten seconds while it has any.
    pub struct KeepSessions {
        /// The client.
        pub client: ClientId,
        /// Every request up to this one has been answered: their records may go.
        pub acknowledged: u64,
    }
}
request!(KeepSessions = 0x030f -> ());
