// The groups of this process by name. Ops take a name, so each call looks one up here.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "runtime/group.h"

namespace interlace {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Group>, std::less<>> groups;
};

Registry& registry() {
  static Registry* instance = new Registry;  // never destroyed: a thread may still be in a call at exit
  return *instance;
}

}  // namespace

void register_group(std::shared_ptr<Group> group) {
  const std::lock_guard lock(registry().mutex);
  registry().groups[group->name()] = std::move(group);
}

void unregister_group(const std::string& name) {
  std::shared_ptr<Group> last;  // destroyed outside the lock: unmapping takes a while
  const std::lock_guard lock(registry().mutex);
  auto found = registry().groups.find(name);
  if (found == registry().groups.end()) return;
  last = std::move(found->second);
  registry().groups.erase(found);
  // forgotten, not destroyed: that would write to memory which a forked child does not have
  if (last->inherited()) new std::shared_ptr<Group>(std::move(last));
}

std::shared_ptr<Group> find_group(const std::string& name) {
  const std::lock_guard lock(registry().mutex);
  auto found = registry().groups.find(name);
  return found == registry().groups.end() ? nullptr : found->second;
}

Backend& default_backend() {
  static Backend choice = Backend::kAuto;
  return choice;
}

Backend& backend() {
  thread_local Backend choice = default_backend();
  return choice;
}

Path& last_path() {
  thread_local Path path;
  return path;
}

std::shared_ptr<Group> fused_group(Op op, const std::string& name) {
  auto group = find_group(name);
  if (group != nullptr && backend() != Backend::kReference) return group;
  if (backend() == Backend::kFused) {
    throw CollectiveFailure(FailureKind::kInvalid,
                            std::string(op_name(op)) + ": interlace.backend(\"fused\") but group '" + name +
                                "' has no symmetric memory; interlace.resolve(group).fallback says why");
  }
  note_path({op, "reference",
             group == nullptr ? "the group has no symmetric memory: torch.distributed"
                              : "interlace.backend(\"reference\"): torch.distributed",
             false});
  return nullptr;
}

namespace {
std::atomic<bool> print_paths{false};
}

void set_print_paths(bool print) { print_paths.store(print); }

void note_path(const Path& path) {
  last_path() = path;
  if (!print_paths.load(std::memory_order_relaxed)) return;
  static std::mutex mutex;
  static std::set<std::pair<Op, std::string>> seen;
  const std::lock_guard lock(mutex);
  if (!seen.emplace(path.op, path.algorithm).second) return;
  std::fprintf(stderr, "interlace[%d]: %s: %s (%s)\n", getpid(), op_name(path.op), path.algorithm,
               path.reason);
}

std::vector<std::string> group_names() {
  const std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, group] : registry().groups) names.push_back(name);
  return names;
}

}  // namespace interlace
