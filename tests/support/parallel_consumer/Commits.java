import io.confluent.parallelconsumer.offsets.OffsetEncoding;
import io.confluent.parallelconsumer.offsets.OffsetMapCodecManager;
import io.confluent.parallelconsumer.offsets.OffsetSimultaneousEncoder;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.SortedSet;
import java.util.TreeSet;

/**
 * What each encoder of Confluent's Parallel Consumer makes of known offsets, and what its own decoder reads in it:
 * encoding, committed offset, runs that are complete (start-end, without the end), text. Texts that no broker stores are
 * left out.
 */
public final class Commits {
    private static final int MOST_CHARACTERS = 4096;

    public static void main(String[] arguments) throws Exception {
        OffsetSimultaneousEncoder.compressionForced = true;
        encode(420, 419, List.of());
        encode(0, 1, List.of(0L));
        encode(420, 421, List.of(420L));
        encode(420, 430, List.of(420L, 424L, 425L));
        encode(420, 420 + 256 + 255, between(420, 420 + 256));
        encode(420, 420 + 3_000, between(420, 420 + 1_000));
        encode(9_007_199_254_740_993L, 9_007_199_254_740_993L + 200, List.of(9_007_199_254_740_993L));
        encode(1_000_000, 1_000_000 + Short.MAX_VALUE - 1, List.of(1_000_000L, 1_020_000L));
        encode(1_000_000, 1_000_000 + Short.MAX_VALUE, List.of(1_000_000L, 1_000_001L));
        encode(7, 7 + 900_000, List.of(7L, 400_000L, 400_002L));
        encode(7, 7 + 2_000_000, List.of(7L));
        for (int share : new int[] {5, 50, 95}) {
            for (int length : new int[] {9, 64, 500}) {
                encode(420, 420 + length, random(share, length));
            }
        }
        List<Long> everySecond = new ArrayList<>();
        for (long offset = 420; offset < 1_020; offset += 2) {
            everySecond.add(offset);
        }
        encode(420, 1_019, everySecond);
    }

    private static List<Long> between(long start, long end) {
        List<Long> offsets = new ArrayList<>();
        for (long offset = start; offset < end; offset++) {
            offsets.add(offset);
        }
        return offsets;
    }

    /** The committed offset is incomplete, the highest is complete, and so many in a hundred of those between. */
    private static List<Long> random(int share, int length) {
        Random random = new Random(31L * share + length);
        List<Long> incomplete = new ArrayList<>(List.of(420L));
        for (long offset = 421; offset < 420 + length; offset++) {
            if (random.nextInt(100) >= share) {
                incomplete.add(offset);
            }
        }
        return incomplete;
    }

    private static void encode(long committed, long highest, List<Long> incompletes) throws Exception {
        SortedSet<Long> incomplete = new TreeSet<>(incompletes);
        OffsetSimultaneousEncoder encoder = new OffsetSimultaneousEncoder(committed, highest, incomplete).invoke();
        for (Map.Entry<OffsetEncoding, byte[]> encoded : encoder.getEncodingMap().entrySet()) {
            byte[] content = new byte[encoded.getValue().length + 1];
            content[0] = encoded.getKey().getMagicByte();
            System.arraycopy(encoded.getValue(), 0, content, 1, encoded.getValue().length);
            print(encoded.getKey().name(), committed, Base64.getEncoder().encodeToString(content));
        }
        print("smallest", committed, Base64.getEncoder().encodeToString(encoder.packSmallest()));
    }

    private static void print(String encoding, long committed, String text) throws Exception {
        if (text.length() > MOST_CHARACTERS) {
            return;
        }
        var read = OffsetMapCodecManager.deserialiseIncompleteOffsetMapFromBase64(committed, text);
        List<String> runs = new ArrayList<>();
        long start = committed;
        for (long incomplete : read.getIncompleteOffsets()) {
            if (incomplete > start) {
                runs.add(start + "-" + incomplete);
            }
            start = incomplete + 1;
        }
        long end = read.getHighestSeenOffset().orElseThrow() + 1;
        if (end > start) {
            runs.add(start + "-" + end);
        }
        System.out.println(
                encoding + " " + committed + " " + (runs.isEmpty() ? "nothing" : String.join(",", runs)) + " " + text);
    }
}
