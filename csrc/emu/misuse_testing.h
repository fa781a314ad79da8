// Tests of wrong kernels: each runs in a child process, whose end and words are checked.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "emu/testing.h"

namespace interlace::emu {

struct ChildEnd {
  bool succeeded;
  std::string text;  // what it printed
};

// Call it before any World is made: a child of a process with several threads may not start threads under
// ThreadSanitizer.
inline ChildEnd run_in_child(const std::function<void()>& body) {
  int ends[2];
  require(pipe(ends) == 0, "no pipe for a child process");
  std::fflush(nullptr);
  const pid_t child = fork();
  require(child >= 0, "no child process");
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    body();
    std::exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t bytes; (bytes = read(ends[0], part, sizeof(part))) > 0;) text.append(part, bytes);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) && WEXITSTATUS(status) == 0, text};
}

// The kernel must be refused with these words.
inline void require_misuse(const std::string& name, const std::string& words,
                           const std::function<void()>& body) {
  const ChildEnd end = run_in_child(body);
  require(!end.succeeded, name + ": not noticed");
  require(end.text.find(words) != std::string::npos, name + ": expected \"" + words + "\", got\n" + end.text);
}

// A right kernel, or the harness would pass whatever it runs.
inline void require_success(const std::string& name, const std::function<void()>& body) {
  const ChildEnd end = run_in_child(body);
  require(end.succeeded, name + " failed:\n" + end.text);
}

// How a bug shows: as a race, which only ThreadSanitizer sees; as a wrong result or a refusal, with it or without; as a
// race with it and a wrong result without.
enum class Shows { kRace, kFailure, kRaceOrFailure };

// `body` ends the program when the result is wrong.
inline void require_caught(const std::string& name, Shows shows, const std::function<void()>& body) {
  if (shows == Shows::kRace && !INTERLACE_EMU_TSAN) return;
  const bool race = shows != Shows::kFailure && INTERLACE_EMU_TSAN;
  require_misuse(name, race ? "WARNING: ThreadSanitizer: data race" : "FAILED", body);
}

}  // namespace interlace::emu
